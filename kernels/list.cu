// The entries of some buckets, for the host to look at: whose they are, where their rows lie and how long they were
// unused. What the host then decides of them (which go by the rank of their rows, which are hot enough for the
// next start) is more than a kernel should know.
//
// Runs on the replacement stream (replace.cu), so no entry is linked or unlinked meanwhile, and the slot of every
// entry that is seen is one that nobody writes: its tag is whole.
#include "common.cuh"

struct Listed {
    u64 key;       // EMPTY for a slot without an entry
    u64 location;
    u64 tag;       // the words that are a tag where its key has several rows
    u32 age;
    u32 unused;
};

struct ListArgs {
    const Slot* index;
    const u32* pool;  // null where no row has a tag
    Listed* listed;   // count x SLOTS: written
    u64 pool_words;
    u64 buckets;
    u64 from;         // the first bucket, or what chooses them
    u64 now;
    u32 count;        // buckets
    u32 drawn;        // whether they are drawn, and not a stretch that goes round
};

// A thread a slot.
extern "C" __global__ void list_entries(ListArgs args) {
    const u64 slots = static_cast<u64>(args.count) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        const u64 number = args.from + i / SLOTS;
        const Slot* slot = args.index + (args.drawn ? scatter(number) : number) % args.buckets * SLOTS + i % SLOTS;
        const u64 key = load(&slot->key), word = load(&slot->word), location = location_of(word);
        if (key <= TOMBSTONE) {
            args.listed[i] = {EMPTY, 0, 0, 0, 0};
            continue;
        }
        // A row of one word at the pool's end has no two: nor a tag.
        const bool readable = args.pool && !(location & 1) && (location >> 1) + TAG_WORDS <= args.pool_words;
        args.listed[i] = {key, location, readable ? tag_at(args.pool, location) : 0, age(args.now, stamp_of(word)), 0};
    }
}
