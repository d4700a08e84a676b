// Small kernels that test the simulator itself (src/device/cusim/tests.rs). Some are correct, and give the
// right result under every seed. Each of the others has one planted bug, which the tests must detect.
#include "../common.cuh"

// One block reverses `values` through shared memory.
extern "C" __global__ void reverse_with_barrier(u32* values, u32 count) {
    u32* copy = dynamic_shared<u32>();
    copy[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = copy[count - 1 - threadIdx.x];
}

// Planted: the barrier is missing.
extern "C" __global__ void reverse_without_barrier(u32* values, u32 count) {
    u32* copy = dynamic_shared<u32>();
    copy[threadIdx.x] = values[threadIdx.x];
    values[threadIdx.x] = copy[count - 1 - threadIdx.x];
}

extern "C" __global__ void count_atomically(u32* counter) { atomicAdd(counter, 1u); }

// Planted: the increment is not atomic.
extern "C" __global__ void count_plainly(u32* counter) { *counter = *counter + 1; }

// Each warp adds its lanes' values by a tree of shuffles, and votes on which are odd.
extern "C" __global__ void warp_sums(const u32* values, u32* sums, u32* votes) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    u32 sum = values[at];
    for (u32 by = WARP / 2; by; by /= 2) sum += __shfl_down_sync(~0u, sum, by);
    const u32 odd = __ballot_sync(~0u, values[at] % 2);
    if (threadIdx.x % WARP == 0) {
        sums[at / WARP] = sum;
        votes[at / WARP] = odd;
    }
}

// For each lane, the lanes of its warp that have the same value.
extern "C" __global__ void warp_match(const u32* values, u32* same) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    same[at] = __match_any_sync(~0u, values[at]);
}

// Planted: the threads of one block wait at different barriers, in two branches.
extern "C" __global__ void barriers_apart(u32* values) {
    if (threadIdx.x % 2) {
        __syncthreads();
        values[threadIdx.x] = 1;
    } else {
        __syncthreads();
        values[threadIdx.x] = 2;
    }
}

// Planted: half a warp waits at a barrier, and the other half in a ballot of all lanes.
extern "C" __global__ void barrier_against_ballot(u32* values) {
    if (threadIdx.x % WARP < 16) __syncthreads();
    else values[threadIdx.x] = __ballot_sync(~0u, 1);
}

// Planted: lanes take part in an operation although they are not in its mask.
extern "C" __global__ void ballot_outside_mask(u32* values) {
    values[threadIdx.x] = __ballot_sync(0xffffu, 1);
}

// Planted: a shuffle reads a lane outside its mask.
extern "C" __global__ void shuffle_outside_mask(u32* values) {
    if (threadIdx.x < 16) values[threadIdx.x] = __shfl_sync(0xffffu, values[threadIdx.x], 20);
}

// Planted: a loop that waits for a write that never happens.
extern "C" __global__ void spin_for_ever(u32* values) {
    while (*static_cast<volatile u32*>(values) == 0) __nanosleep(20);
}

// Message passing: thread i of block 0 writes message i and then flag i. Thread i of block 1 reads the flag
// and then the message. `use` is a set of the bits below, which select fences and operations. Without both
// fences, block 1 may see a flag without its message.
constexpr u32 RELEASE = 1, ACQUIRE = 2, ATOMICALLY = 4, OTHER_LANE = 8, SYNC_WARP = 16;

extern "C" __global__ void pass_message(u64* memory, u64* flags, u64* data, u32 use) {
    u64* mine = memory + 2 * threadIdx.x;
    if (blockIdx.x == 0) {
        if (use & ATOMICALLY) atomicCAS(mine, 0, 1);
        else store<u64>(mine, 1);
        if (use & RELEASE) __threadfence();
        if (use & ATOMICALLY) atomicExch(mine + 1, 1);
        else store<u64>(mine + 1, 1);
    } else {
        // With OTHER_LANE, another lane reads the flag and passes it on by a shuffle.
        const u32 other = use & OTHER_LANE ? 1 : 0;
        const u64 flag = load(memory + 2 * (threadIdx.x ^ other) + 1);
        if (use & ACQUIRE) __threadfence();
        if (use & SYNC_WARP) __syncwarp();
        flags[threadIdx.x] = __shfl_xor_sync(ALL_LANES, flag, other);
        data[threadIdx.x] = load(mine);
    }
}

// Block 0 counts up. The others read the counter several times, and store the first and the last value.
extern "C" __global__ void read_again(u32* counter, u32* first, u32* last) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    first[at] = load(counter);
    for (u32 i = 0; i < 8; ++i) {
        if (blockIdx.x == 0) atomicAdd(counter, 1u);
        else last[at] = load(counter);
    }
}

// Every thread counts itself, and the last block reads the counters.
extern "C" __global__ void count_blocks(u32* counters, u32* blocks, u32* counted) {
    atomicAdd(counters + threadIdx.x, 1u);
    if (last_block(blocks)) counted[threadIdx.x] = load(counters + threadIdx.x);
}

// Planted: as above, without the fences of `last_block`.
extern "C" __global__ void count_blocks_without_fences(u32* counters, u32* blocks, u32* counted) {
    atomicAdd(counters + threadIdx.x, 1u);
    __syncthreads();
    const bool last = threadIdx.x == 0 && atomicAdd(blocks, 1u) == gridDim.x - 1;
    if (__syncthreads_or(last)) counted[threadIdx.x] = load(counters + threadIdx.x);
}

// Tests `fold` against the host's.
extern "C" __global__ void fold_numbers(const u64* numbers, u64* folded, u32 bits) {
    folded[threadIdx.x] = fold(numbers[threadIdx.x], bits);
}
