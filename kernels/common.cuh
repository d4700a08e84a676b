// What every kernel shares: integer names, the identification step of a fused launch, the index, and what a
// batch's kernels tell one another.
//
// The files of this folder are compiled three ways from one text: by nvcc, by NVRTC at run time, and,
// for tests on a machine with no GPU, as C++ by cusim (the folder beside this file). So they include no
// header but this one, and use no inline PTX, cooperative groups or textures.
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

// Which segment of a fused launch a warp works for: the last `i` below `segments` with
// `scan[i] <= warp`, where `scan` is the exclusive prefix sum of the segments' warps (FLECHE, section
// 3.2). Empty segments are stepped over. The whole warp takes the same branches, since a segment's
// threads are rounded up to whole warps.
__device__ __forceinline__ u32 segment_of(const u32* scan, u32 segments, u32 warp) {
    u32 low = 0, high = segments;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (scan[middle] <= warp) low = middle;
        else high = middle;
    }
    return low;
}

// Lanes of a warp before this one.
__device__ __forceinline__ u32 lanes_before(u32 lane) { return (1u << lane) - 1; }

// A load that the compiler neither merges with another nor moves across one, and that no stale cache answers:
// what other threads write meanwhile is read by this alone.
template <class T> __device__ __forceinline__ T load(const T* at) {
    return *static_cast<const volatile T*>(at);
}
template <class T> __device__ __forceinline__ void store(T* at, T value) {
    *static_cast<volatile T*>(at) = value;
}

// ---- The index: field for field, and number for number, src/cache/index.rs. ----

constexpr u64 EMPTY = 0;      // the key of a slot that holds nothing
constexpr u64 TOMBSTONE = 1;  // the key of a slot that some thread is changing, and owns
constexpr u32 SLOTS = 8;      // of a bucket, which is a line of 128 bytes

struct Slot {
    u64 key;
    u64 word;  // location, 40 bits, and stamp, 24
};

constexpr u32 LOCATION_BITS = 40;
constexpr u64 LOCATION_MASK = (1ull << LOCATION_BITS) - 1;
constexpr u64 STAMP_MASK = (1ull << (64 - LOCATION_BITS)) - 1;
constexpr u64 AHEAD = 1ull << 16;  // how far batches may overtake each other
constexpr u64 NOWHERE = ~0ull;     // no location

__device__ __forceinline__ u64 location_of(u64 word) { return word & LOCATION_MASK; }
__device__ __forceinline__ u64 stamp_of(u64 word) { return word >> LOCATION_BITS; }
__device__ __forceinline__ u64 pack(u64 location, u64 stamp) { return location | stamp << LOCATION_BITS; }

// How many batches before `now` the stamp is; 0 for one of a batch that overtook.
__device__ __forceinline__ u32 age(u64 now, u64 stamp) {
    const u64 age = (now - stamp) & STAMP_MASK;
    return age > STAMP_MASK - AHEAD ? 0 : static_cast<u32>(age);
}

// SplitMix64's finaliser: a bijection that scatters a key over 64 bits.
__device__ __forceinline__ u64 scatter(u64 key) {
    u64 x = key + 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A number hashed into so many bits, 0 to 64: the high ones of `scatter`. As `fold` of src/types.rs.
__device__ __forceinline__ u64 fold(u64 number, u32 bits) { return bits ? scatter(number) >> (64 - bits) : 0; }

// Of a key's two buckets, which may be one, the first (0) or the second (1).
__device__ __forceinline__ Slot* bucket_of(Slot* index, u64 buckets, u64 key, u32 which) {
    const u64 hash = scatter(key);
    const u64 half = which ? hash & 0xffffffffull : hash >> 32;
    return index + (half * buckets >> 32) * SLOTS;
}

// Who brings a slot's key to TOMBSTONE owns the slot until it stores another key there (replace.cu).
__device__ __forceinline__ bool claim(Slot* slot, u64 key) { return atomicCAS(&slot->key, key, TOMBSTONE) == key; }

// The owner of a slot gives it to a key. Returns the location that the slot had.
__device__ __forceinline__ u64 give(Slot* slot, u64 key, u64 location, u64 now) {
    const u64 before = atomicExch(&slot->word, pack(location, now));
    __threadfence();
    store(&slot->key, key);
    return location_of(before);
}

// ---- What the kernels of one batch share: `ProbeColumn`, `Changed`, `BatchHeader`, `BatchState` of
// src/device/cuda/args.rs, field for field. ----

// The ids that one lookup reads, and how they become keys.
struct ProbeColumn {
    u64 base;            // the first of its table's own keys: a row's own key is base | id
    u64 rows;            // ids of the table are below; any other reads as zeros
    u32 ids_at;          // where its ids begin
    u32 occurrences_at;  // where its occurrences begin; lookups may share ids, and never occurrences
    u32 ids;             // how many
    u32 row_words;       // words of 4 bytes in a row
};

// How the ids of a lookup become keys of the index, where its keys are not wide enough for all tables' own keys:
// `NarrowColumn` of src/device/cuda/args.rs.
struct NarrowColumn {
    u64 base;    // the first key of its table's block in the index
    u32 bits;    // the block has 2^bits keys
    u32 tagged;  // whether ids are hashed into them, so that rows bear tags
};

// One slot of a version's overlay, an immutable table of open addressing: of a changed row, where it is.
struct Changed {
    u64 key;       // the row's own; EMPTY: no row
    u64 location;  // NOWHERE: the cache does not hold it
};

// Written by the host before a batch, in pinned memory.
struct BatchHeader {
    u64 now;                 // the batch's stamp
    const Changed* overlay;  // what the batch's version asks before the index; null: nothing
    u64 overlay_mask;        // the overlay has one slot more, and an empty one among them
    u32 generation;          // of the deduplication, never 0
    u32 samples;
    u32 staged;              // rows of misses that are there
    u32 unused;
};

// On the device, from kernel to kernel. The first three are 0 between launches.
struct BatchState {
    u32 cursor;   // misses numbered so far
    u32 pointed;  // rows of the host numbered so far
    u32 blocks;   // blocks that are done
    u32 misses;   // of the last probe
    u32 copied;   // words of the copy buffer in use
    u32 unused;
};

// Where an occurrence's row is: a kind in the upper three bits, and a value.
constexpr u32 PLACE_SHIFT = 61;
constexpr u64 PLACE_VALUE = (1ull << PLACE_SHIFT) - 1;
constexpr u64 AT_LOCATION = 0;                   // value: a location of the index
constexpr u64 AT_MISS = 1ull << PLACE_SHIFT;     // value: the number of a miss
constexpr u64 AT_OWNER = 2ull << PLACE_SHIFT;    // where its owner's row is
constexpr u64 AT_COPY = 3ull << PLACE_SHIFT;     // value: words from the copy buffer's start
constexpr u64 AT_NOTHING = 4ull << PLACE_SHIFT;  // an absent id, read as zeros

__device__ __forceinline__ u64 kind_of(u64 place) { return place & ~PLACE_VALUE; }

// The row of a location: in the pool, or in memory of the host that the device sees.
__device__ __forceinline__ const u32* row_of(u64 location, const u32* pool, const u32* host) {
    return (location & 1 ? host : pool) + (location >> 1);
}

// A row whose key others may have bears its own key as a tag: the first words of its slot.
constexpr u32 TAG_WORDS = 2;

// The tag at a location of the pool. Loaded past the cache of the multiprocessor, which may hold what the slot was
// before; the fence that keeps it behind the load that gave the location is the caller's.
__device__ __forceinline__ u64 tag_at(const u32* pool, u64 location) {
    const u32* tag = pool + (location >> 1);
    return load(tag) | static_cast<u64>(load(tag + 1)) << 32;
}

// Ends a launch whose blocks count themselves: true in every thread of the block that is the last to come
// here, which then sees all that the others wrote. The counter is back at 0 for the next launch.
__device__ __forceinline__ bool last_block(u32* blocks) {
    __threadfence();
    __syncthreads();  // before the first thread counts the block, all of it has written
    const bool mine = __syncthreads_or(threadIdx.x == 0 && atomicAdd(blocks, 1u) == gridDim.x - 1);
    if (mine && threadIdx.x == 0) store(blocks, 0u);
    __threadfence();
    return mine;
}
