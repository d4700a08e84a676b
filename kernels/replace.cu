// Replacement: `copy_in` copies rows to their slots of the pool, and then `link_keys`, the next kernel of the
// same stream, links them in the index. So a probe that finds a key finds its row, and the gather after that
// probe reads it.
//
// All kernels that change the index, those here and in sweep.cu, run on this one stream, one after the other.
// Threads of one launch exclude each other by claiming slots (`claim` and `publish` of common.cuh). If a
// thread loses a claim, another thread has made progress. The loser looks at the slots again. An insert gives
// up after some tries.
//
// Jobs of the kind JOB_LOOK change nothing. A launch has only these or none of them.
//
// The host makes sure that the keys of a launch are distinct. So no other thread links a job's key. Another
// thread may evict the key's entry, which has the same effect as an eviction before or after the job.
//
// **Tags.** Rows that may share a key have a tag, their full key. A job for a row replaces the entry of
// another row with the same key, so the row that was wanted last is cached. The tag is read before the claim,
// from a slot of the pool that is not written during the launch; if the entry has changed meanwhile, the
// claim fails.
#include "common.cuh"

enum { JOB_KEEP, JOB_SWAP, JOB_WITHDRAW, JOB_LOOK };
enum { LINK_NEW, LINK_PRESENT, LINK_REPLACED, LINK_FULL, LINK_SWAPPED, LINK_WITHDRAWN, LINK_ABSENT };

struct ReplaceJob {
    u64 key;
    u64 location;
    u64 row;    // the row's address; 0: the slot is filled with POISON
    u64 tag;    // the row's full key if other rows may share its key; else 0, and the slot has no tag
    u32 words;  // of the row; 0: nothing is copied
    u32 kind;   // JOB_: what to do if the key is linked already
    u32 older;  // the entry's initial age in batches
    u32 unused;
};

struct Outcome {
    u64 key;       // of the entry that was removed, or that JOB_LOOK found; else EMPTY
    u64 location;  // of that entry
    u32 link;      // LINK_: what the job did
    u32 unused;
};

struct ReplaceArgs {
    const ReplaceJob* jobs;
    Outcome* outcomes;
    Slot* index;
    u32* pool;
    u64 buckets;
    u64 now;
    u32 count;
    u32 may_replace;  // MAY_: what a job may evict
};

// What a job may evict besides its own row's entry: nothing, another row with its key, or also the coldest
// entry of a full pair of buckets.
enum { MAY_NOTHING, MAY_SAME_KEY, MAY_COLDEST };

constexpr u32 POISON = 0x7FC0DEADu;
constexpr u32 TRIES = 64;

// One warp per job.
extern "C" __global__ void copy_in(ReplaceArgs args) {
    const u32 warps = gridDim.x * (blockDim.x / WARP);
    for (u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; i < args.count; i += warps) {
        const ReplaceJob job = args.jobs[i];
        const u32* row = reinterpret_cast<const u32*>(job.row);
        u32* slot = args.pool + (job.location >> 1);
        if (job.tag) {
            const u32 word = threadIdx.x % WARP;
            // Probes on other streams may load the tag at the same time, so a plain store is not enough.
            if (word < TAG_WORDS && job.words) store(slot + word, static_cast<u32>(job.tag >> 32 * word));
            slot += TAG_WORDS;
        }
        for (u32 word = threadIdx.x % WARP; word < job.words; word += WARP)
            slot[word] = row ? row[word] : POISON;
    }
}

// Links an owned slot for a job. Returns the slot's previous location.
__device__ __forceinline__ u64 publish_job(const ReplaceArgs& args, const ReplaceJob& job, Slot* slot) {
    return publish(slot, job.key, job.location, args.now - job.older);
}

// The slot that has a key, or null.
__device__ __forceinline__ Slot* slot_of(const ReplaceArgs& args, u64 key) {
    for (u32 i = 0; i < 2 * SLOTS; ++i) {
        Slot* slot = bucket_of(args.index, args.buckets, key, i / SLOTS) + i % SLOTS;
        if (load(&slot->key) == key) return slot;
    }
    return nullptr;
}

// Claims a free slot of the emptier bucket; null if there is none, or if the claim is lost.
__device__ __forceinline__ Slot* claim_vacancy(const ReplaceArgs& args, u64 key) {
    Slot* vacant[2] = {nullptr, nullptr};
    u32 vacancies[2] = {0, 0};
    for (u32 i = 0; i < 2 * SLOTS; ++i) {
        Slot* slot = bucket_of(args.index, args.buckets, key, i / SLOTS) + i % SLOTS;
        if (load(&slot->key) != EMPTY) continue;
        vacant[i / SLOTS] = slot;
        ++vacancies[i / SLOTS];
    }
    Slot* slot = vacancies[1] > vacancies[0] ? vacant[1] : vacant[0];
    return slot && claim(slot, EMPTY) ? slot : nullptr;
}

// Claims the slot in the key's buckets that has been unused for longest, and sets `evicted` to its key.
// Returns null if there is a free slot by now, or if the claim is lost.
__device__ __forceinline__ Slot* claim_coldest(const ReplaceArgs& args, u64 key, u64* evicted) {
    Slot* coldest = nullptr;
    u32 oldest = 0;
    for (u32 i = 0; i < 2 * SLOTS; ++i) {
        Slot* slot = bucket_of(args.index, args.buckets, key, i / SLOTS) + i % SLOTS;
        const u64 held = load(&slot->key);
        if (held == EMPTY) return nullptr;
        const u32 unused = age(args.now, stamp_of(load(&slot->word)));
        if (held == TOMBSTONE || (coldest && unused <= oldest)) continue;
        coldest = slot;
        oldest = unused;
        *evicted = held;
    }
    return coldest && claim(coldest, *evicted) ? coldest : nullptr;
}

__device__ __forceinline__ Outcome insert(const ReplaceArgs& args, const ReplaceJob& job) {
    for (u32 tries = 0; tries < TRIES; ++tries) {
        Slot* slot = claim_vacancy(args, job.key);
        if (slot) {
            publish_job(args, job, slot);
            return {EMPTY, 0, LINK_NEW, 0};
        }
        if (args.may_replace < MAY_COLDEST) continue;
        u64 evicted = EMPTY;
        slot = claim_coldest(args, job.key, &evicted);
        if (slot) return {evicted, publish_job(args, job, slot), LINK_REPLACED, 0};
    }
    return {EMPTY, 0, LINK_FULL, 0};
}

// The slot had the job's key. Returns whether its entry belongs to another row.
__device__ __forceinline__ bool is_other(const ReplaceArgs& args, const ReplaceJob& job, const Slot* slot) {
    if (!job.tag) return false;
    const u64 location = location_of(load(&slot->word));
    return location & 1 || tag_at(args.pool, location) != job.tag;
}

__device__ __forceinline__ Outcome carry_out(const ReplaceArgs& args, const ReplaceJob& job) {
    for (;;) {
        Slot* slot = slot_of(args, job.key);
        if (!slot && (job.kind == JOB_WITHDRAW || job.kind == JOB_LOOK)) return {EMPTY, 0, LINK_ABSENT, 0};
        if (!slot) return insert(args, job);
        const bool other = is_other(args, job, slot);
        if (other && (job.kind == JOB_WITHDRAW || job.kind == JOB_LOOK)) return {EMPTY, 0, LINK_ABSENT, 0};
        // If the claim below succeeds, this is still the entry's location: no other thread links this key.
        const u64 held = location_of(load(&slot->word));
        if (job.kind == JOB_LOOK) return {job.key, held, LINK_PRESENT, 0};
        // JOB_KEEP keeps a row in the pool. It keeps a pointer to host memory unless the job's row is in the
        // pool.
        const bool keeps = job.kind == JOB_KEEP && (held & 1) <= (job.location & 1);
        if (other ? args.may_replace == MAY_NOTHING : keeps) return {EMPTY, 0, LINK_PRESENT, 0};
        if (!claim(slot, job.key)) continue;  // evicted meanwhile
        if (other) return {job.key, publish_job(args, job, slot), LINK_REPLACED, 0};
        if (job.kind != JOB_WITHDRAW) return {job.key, publish_job(args, job, slot), LINK_SWAPPED, 0};
        store(&slot->key, EMPTY);
        return {job.key, held, LINK_WITHDRAWN, 0};
    }
}

// One thread per job.
extern "C" __global__ void link_keys(ReplaceArgs args) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count; i += gridDim.x * blockDim.x)
        args.outcomes[i] = carry_out(args, args.jobs[i]);
}
