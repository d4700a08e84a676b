// Lists the entries of some buckets for the host: their keys, locations and ages. From these the host decides
// which entries to evict by rank, and which rows to save for the next warm start.
//
// Runs on the replacement stream (replace.cu), so meanwhile the index does not change, and no row of a listed
// entry is written. So each tag is complete.
#include "common.cuh"

struct Listed {
    u64 key;       // EMPTY: a free slot
    u64 location;
    u64 tag;       // the first words of the row's slot: the tag, if the row has one
    u32 age;
    u32 unused;
};

struct ListArgs {
    const Slot* index;
    const u32* pool;  // null if no row has a tag
    Listed* listed;   // count x SLOTS; output
    u64 pool_words;
    u64 buckets;
    u64 from;         // the first bucket, or a random seed
    u64 now;
    u32 count;        // number of buckets to list
    u32 drawn;        // whether buckets are random; else a contiguous stretch, which wraps around
};

// One thread per slot.
extern "C" __global__ void list_entries(ListArgs args) {
    const u64 slots = static_cast<u64>(args.count) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        const u64 number = args.from + i / SLOTS;
        const u64 bucket = (args.drawn ? mix64(number) : number) % args.buckets;
        const Slot* slot = args.index + bucket * SLOTS + i % SLOTS;
        const u64 key = load(&slot->key), word = load(&slot->word), location = location_of(word);
        if (key <= TOMBSTONE) {
            args.listed[i] = {EMPTY, 0, 0, 0, 0};
            continue;
        }
        // A tag has two words. A row of one word at the end of the pool has no tag and no second word.
        const bool readable = args.pool && !(location & 1) && (location >> 1) + TAG_WORDS <= args.pool_words;
        const u64 tag = readable ? tag_at(args.pool, location) : 0;
        args.listed[i] = {key, location, tag, age(args.now, stamp_of(word)), 0};
    }
}
