// Replacement (DESIGN.md section 4): rows are copied in by one kernel, and linked under their keys by the next on
// the same stream. So a reader never sees a key before its row: all that a kernel wrote is there for
// whoever sees what a later kernel of its stream wrote, and a gather, which begins after the probe that
// found the key, has nothing older in its caches.
//
// Every kernel that changes the index, these and sweep.cu, runs on that one stream, one after the other. Within
// a launch threads exclude each other by claims: **who brings a slot's key to TOMBSTONE owns the slot** until
// it stores another key there (`claim` and `give` of common.cuh). Its word is then nobody else's, but for probes
// that stamp it: they change no location, and their compare-exchange fails once the word is exchanged. An owner
// exchanges the word, and then stores the key, with a fence between, so that a probe that sees the new key sees
// its location too. A thread that loses a claim has seen another make progress, and looks again; it gives up
// after some tries.
//
// Jobs that look change nothing, and are launched by themselves.
//
// The keys of a launch are distinct (the host sees to it), so that no other thread links the key that this one
// looks for in vain. Another may put that key's entry out: then this is as if the two had come in turn.
//
// **Tags.** Where several rows have one key, each lies behind a tag, its own key. A job for a row whose key another
// row has takes that one's place, and so the row last asked for is there. The tag is read before the claim, from a
// slot that is not written during the launch: should the entry change hands between, the claim fails.
#include "common.cuh"

enum { JOB_KEEP, JOB_SWAP, JOB_WITHDRAW, JOB_LOOK };
enum { LINK_NEW, LINK_PRESENT, LINK_REPLACED, LINK_FULL, LINK_SWAPPED, LINK_WITHDRAWN, LINK_ABSENT };

struct ReplaceJob {
    u64 key;
    u64 location;
    u64 row;    // the address of the row; 0 poisons the slot
    u64 tag;    // the row's own key, where others may have its key; else 0, and the slot has no tag
    u32 words;  // of the row; 0 where nothing is to be copied
    u32 kind;   // JOB_: what to do where the key is there already
    u32 older;  // how many batches before `now` it is linked as if used
    u32 unused;
};

struct Outcome {
    u64 key;       // of the entry that left the index, or that was looked for and found; else EMPTY
    u64 location;  // its location
    u32 link;      // LINK_
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
    u32 may_replace;  // MAY_
};

// What a job may put out besides its own row's entry: nothing, another row of its key, or also the coldest entry of
// a full pair of buckets.
enum { MAY_NOTHING, MAY_SAME_KEY, MAY_COLDEST };

constexpr u32 POISON = 0x7FC0DEADu;
constexpr u32 TRIES = 64;

// A warp a job.
extern "C" __global__ void copy_in(ReplaceArgs args) {
    const u32 warps = gridDim.x * (blockDim.x / WARP);
    for (u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; i < args.count; i += warps) {
        const ReplaceJob job = args.jobs[i];
        const u32* row = reinterpret_cast<const u32*>(job.row);
        u32* slot = args.pool + (job.location >> 1);
        if (job.tag) {
            if (threadIdx.x % WARP < TAG_WORDS && job.words)
                slot[threadIdx.x % WARP] = static_cast<u32>(job.tag >> 32 * (threadIdx.x % WARP));
            slot += TAG_WORDS;
        }
        for (u32 word = threadIdx.x % WARP; word < job.words; word += WARP)
            slot[word] = row ? row[word] : POISON;
    }
}

// The owner of a slot gives it to a job's key. Returns the location that the slot had.
__device__ __forceinline__ u64 give_to(const ReplaceArgs& args, const ReplaceJob& job, Slot* slot) {
    return give(slot, job.key, job.location, args.now - job.older);
}

__device__ __forceinline__ Slot* slot_of(const ReplaceArgs& args, u64 key) {
    for (u32 i = 0; i < 2 * SLOTS; ++i) {
        Slot* slot = bucket_of(args.index, args.buckets, key, i / SLOTS) + i % SLOTS;
        if (load(&slot->key) == key) return slot;
    }
    return nullptr;
}

// An empty slot of the emptier bucket, claimed; null where there is none, or a claim was lost.
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

// The entry of the key's buckets that was longest unused, claimed; its key goes to `evicted`.
__device__ __forceinline__ Slot* claim_coldest(const ReplaceArgs& args, u64 key, u64* evicted) {
    Slot* coldest = nullptr;
    u32 oldest = 0;
    for (u32 i = 0; i < 2 * SLOTS; ++i) {
        Slot* slot = bucket_of(args.index, args.buckets, key, i / SLOTS) + i % SLOTS;
        const u64 held = load(&slot->key);
        if (held == EMPTY) return nullptr;  // freed meanwhile: take that one
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
            give_to(args, job, slot);
            return {EMPTY, 0, LINK_NEW, 0};
        }
        if (args.may_replace < MAY_COLDEST) continue;
        u64 evicted = EMPTY;
        slot = claim_coldest(args, job.key, &evicted);
        if (slot) return {evicted, give_to(args, job, slot), LINK_REPLACED, 0};
    }
    return {EMPTY, 0, LINK_FULL, 0};
}

// Whether an entry of a job's key, which it was when its slot was found, is of another row.
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
        const u64 held = location_of(load(&slot->word));
        if (job.kind == JOB_LOOK) return {job.key, held, LINK_PRESENT, 0};
        // A row in the pool is better than a pointer to it, and nothing is better than a row in the pool.
        const bool keeps = job.kind == JOB_KEEP && (held & 1) <= (job.location & 1);
        if (other ? args.may_replace == MAY_NOTHING : keeps) return {EMPTY, 0, LINK_PRESENT, 0};
        if (!claim(slot, job.key)) continue;  // put out meanwhile
        if (other) return {job.key, give_to(args, job, slot), LINK_REPLACED, 0};
        if (job.kind != JOB_WITHDRAW) return {job.key, give_to(args, job, slot), LINK_SWAPPED, 0};
        const u64 location = location_of(load(&slot->word));
        store(&slot->key, EMPTY);
        return {job.key, location, LINK_WITHDRAWN, 0};
    }
}

// A thread a job.
extern "C" __global__ void link_keys(ReplaceArgs args) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count; i += gridDim.x * blockDim.x)
        args.outcomes[i] = carry_out(args, args.jobs[i]);
}
