// Shared by all kernels: integer types, segment search of fused launches, the index, and the structs that a
// batch's kernels pass to each other.
//
// The files of this folder are compiled in three ways: by nvcc, by NVRTC at run time, and as C++ by cusim,
// for tests without a GPU. Therefore they include no header but this one, and use no inline PTX, cooperative
// groups or textures.
//
// **Memory order.** Two kernels that run at the same time, or two threads of one kernel, share data only
// through `load`, `store` and atomics. These are relaxed: each address has one order of writes, but nothing
// orders accesses to different addresses. `__threadfence` does, in pairs: if one thread writes A, fences and
// writes B, and another thread reads that B, fences and reads A, the second thread reads that A or a later
// one. `__syncthreads` and `__syncwarp` order accesses among their own threads. Ballots and shuffles do not.
// A kernel sees all writes of earlier kernels of its stream, so data that is passed from kernel to kernel
// needs no fence. cusim tests this: a load without the fences that it needs returns an old value under some
// seed.
#pragma once

#ifdef CUSIM
#include "cusim/cusim.hpp"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// The launch's dynamic shared memory.
template <class T> __device__ __forceinline__ T* dynamic_shared() {
#ifdef CUSIM
    return static_cast<T*>(cusim::dynamic_shared());
#else
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
#endif
}

// The segment of a fused launch that a warp works on: the last `i` below `segments` with `scan[i] <= warp`,
// where `scan` is the exclusive prefix sum of the segments' warps (self-identified fusion: FLECHE, section
// 3.2). Empty segments are skipped. A segment's threads are rounded up to whole warps, so a warp does not
// diverge here.
__device__ __forceinline__ u32 segment_of(const u32* scan, u32 segments, u32 warp) {
    u32 low = 0, high = segments;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (scan[middle] <= warp) low = middle;
        else high = middle;
    }
    return low;
}

// The mask of the lanes before this one.
__device__ __forceinline__ u32 lanes_before(u32 lane) { return (1u << lane) - 1; }

// A relaxed load: the compiler neither merges nor caches it, and it bypasses the multiprocessor's own cache,
// which does not see writes of other multiprocessors.
template <class T> __device__ __forceinline__ T load(const T* at) {
#ifdef CUSIM
    return cusim::load(at);
#else
    return *static_cast<const volatile T*>(at);
#endif
}
// A relaxed store.
template <class T> __device__ __forceinline__ void store(T* at, T value) {
#ifdef CUSIM
    cusim::store(at, value);
#else
    *static_cast<volatile T*>(at) = value;
#endif
}

// ---- The index. Layout and constants are those of src/cache/index.rs. ----

constexpr u64 EMPTY = 0;      // the key of a free slot
constexpr u64 TOMBSTONE = 1;  // the key of a slot that a thread owns and is changing
constexpr u32 SLOTS = 8;      // per bucket, which is a line of 128 bytes

struct Slot {
    u64 key;
    u64 word;  // location (40 bits) and stamp of the last use (24 bits)
};

constexpr u32 LOCATION_BITS = 40;
constexpr u64 LOCATION_MASK = (1ull << LOCATION_BITS) - 1;
constexpr u64 STAMP_MASK = (1ull << (64 - LOCATION_BITS)) - 1;
constexpr u64 AHEAD = 1ull << 16;  // a batch may overtake others by at most this many batches
constexpr u64 NOWHERE = ~0ull;     // not a location

__device__ __forceinline__ u64 location_of(u64 word) { return word & LOCATION_MASK; }
__device__ __forceinline__ u64 stamp_of(u64 word) { return word >> LOCATION_BITS; }
__device__ __forceinline__ u64 pack(u64 location, u64 stamp) { return location | stamp << LOCATION_BITS; }

// The batches from the stamp to `now`; 0 if the stamp is of a later batch.
__device__ __forceinline__ u32 age(u64 now, u64 stamp) {
    const u64 age = (now - stamp) & STAMP_MASK;
    return age > STAMP_MASK - AHEAD ? 0 : static_cast<u32>(age);
}

// SplitMix64's finaliser, a bijection that spreads a key over 64 bits. Equals `mix64` of src/mem/.
__device__ __forceinline__ u64 mix64(u64 key) {
    u64 x = key + 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Hashes a number to `bits` bits (0 to 64): the high bits of `mix64`. Equals `fold` of src/mem/.
__device__ __forceinline__ u64 fold(u64 number, u32 bits) { return bits ? mix64(number) >> (64 - bits) : 0; }

// A key's first (0) or second (1) bucket. Both may be the same.
__device__ __forceinline__ Slot* bucket_of(Slot* index, u64 buckets, u64 key, u32 which) {
    const u64 hash = mix64(key);
    const u64 half = which ? hash & 0xffffffffull : hash >> 32;
    return index + (half * buckets >> 32) * SLOTS;
}

// **Changing a slot.** The thread that changes a slot's key to TOMBSTONE owns the slot until it stores
// another key. Only kernels of the replacement stream claim slots, and they run one after the other
// (replace.cu). Probes run beside them and write nothing but stamps. Probes rely on two rules (probe.cu):
//
// 1. A thread that reads a slot's new word, and then its key, does not read the key from before the claim.
// 2. A thread that reads a slot's new key, and then its word, reads the word of that key or a later one.
//
// The fences of `claim` and `publish` each provide one rule. A fence between the reader's two loads is the
// counterpart.

// Tries to change a slot's key to TOMBSTONE.
__device__ __forceinline__ bool claim(Slot* slot, u64 key) {
    if (atomicCAS(&slot->key, key, TOMBSTONE) != key) return false;
    // Rule 1: orders the claim before the owner's write of the word. It also orders the owner's earlier loads
    // of the slot before the store that ends the ownership.
    __threadfence();
    return true;
}

// Links an owned slot under a key, which ends the ownership. Returns the slot's previous location.
__device__ __forceinline__ u64 publish(Slot* slot, u64 key, u64 location, u64 now) {
    const u64 before = atomicExch(&slot->word, pack(location, now));
    __threadfence();  // rule 2: orders the word before the key
    store(&slot->key, key);
    return location_of(before);
}

// ---- Structs that the kernels of a batch share. They equal those of src/cache/gpu/args.rs and
// src/device/cuda/pool_args.rs, field by field. ----

// The ids of one lookup, and how they become keys.
struct ProbeColumn {
    u64 base;            // a row's full key is base | id
    u64 rows;            // of the table; ids >= rows are absent and read as zeros
    u32 ids_at;          // index of its first id
    u32 occurrences_at;  // index of its first occurrence; lookups may share ids, but not occurrences
    u32 ids;             // number of ids
    u32 row_words;       // words of 4 bytes per row
};

// How the ids of a lookup become keys of an index whose keys are too narrow for the full keys of all tables.
struct NarrowColumn {
    u64 base;    // the first key of the table's block in the index
    u32 bits;    // the block has 2^bits keys
    u32 tagged;  // whether ids are hashed to the block's keys, so that rows have tags
};

// A slot of a version's overlay: an immutable hash table with open addressing, from changed rows to their
// locations.
struct Changed {
    u64 key;       // the row's full key; EMPTY: free slot
    u64 location;  // NOWHERE: not cached
};

// Written by the host before each batch.
struct BatchHeader {
    u64 now;                 // the batch's stamp
    const Changed* overlay;  // searched before the index; null: none
    u64 overlay_mask;        // the number of the overlay's slots minus one; at least one slot is free
    u32 generation;          // of this batch's deduplication entries (probe.cu); never 0
    u32 samples;
};

// In device memory, passed from kernel to kernel. The first three are 0 between launches.
struct BatchState {
    u32 cursor;   // misses numbered so far
    u32 pointed;  // host rows numbered so far
    u32 blocks;   // finished blocks
    u32 misses;   // of the last probe
    u32 copied;   // used words of the copy buffer
    u32 unused;
};

// The place of an occurrence's row: a kind in the upper three bits, and a value.
constexpr u32 PLACE_SHIFT = 61;
constexpr u64 PLACE_VALUE = (1ull << PLACE_SHIFT) - 1;
constexpr u64 AT_LOCATION = 0;                   // value: a location, as in the index
constexpr u64 AT_MISS = 1ull << PLACE_SHIFT;     // value: the number of the miss
constexpr u64 AT_OWNER = 2ull << PLACE_SHIFT;    // the same place as that of the occurrence's owner
constexpr u64 AT_COPY = 3ull << PLACE_SHIFT;     // value: offset in the copy buffer, in words
constexpr u64 AT_NOTHING = 4ull << PLACE_SHIFT;  // an absent id, read as zeros

__device__ __forceinline__ u64 kind_of(u64 place) { return place & ~PLACE_VALUE; }

// The row at a location. If the lowest bit is set, the row is in host memory, else in the pool, which is the
// cache's row memory. The other bits are the row's offset in words.
__device__ __forceinline__ const u32* row_of(u64 location, const u32* pool, const u32* host) {
    return (location & 1 ? host : pool) + (location >> 1);
}

// Rows that may share an index key have a tag, their full key, in the first words of their slot.
constexpr u32 TAG_WORDS = 2;

// The tag at a location of the pool. The caller must order these loads after its load of the location.
__device__ __forceinline__ u64 tag_at(const u32* pool, u64 location) {
    const u32* tag = pool + (location >> 1);
    return load(tag) | static_cast<u64>(load(tag + 1)) << 32;
}

// Called by all threads at the end of a kernel. Returns true in the last block to call it, which then sees
// all writes of the other blocks. The counter is 0 again for the next launch.
__device__ __forceinline__ bool last_block(u32* blocks) {
    __syncthreads();  // orders the block's writes before the first thread's fence
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();  // orders the block's writes before its count
        last = atomicAdd(blocks, 1u) == gridDim.x - 1;
        __threadfence();  // orders the other blocks' counts before the loads of their writes
        if (last) store(blocks, 0u);
    }
    return __syncthreads_or(last);
}
