// Small kernels that try the simulator itself: some are right and must give the right result under every
// seed, the others hold one planted bug each, and tests/it/cusim.rs asserts that it is caught.
#include "../common.cuh"

// One block reverses `values` through shared memory.
extern "C" __global__ void reverse_with_barrier(u32* values, u32 count) {
    u32* copy = dynamic_shared<u32>();
    copy[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = copy[count - 1 - threadIdx.x];
}

// Planted: the barrier is dropped.
extern "C" __global__ void reverse_without_barrier(u32* values, u32 count) {
    u32* copy = dynamic_shared<u32>();
    copy[threadIdx.x] = values[threadIdx.x];
    values[threadIdx.x] = copy[count - 1 - threadIdx.x];
}

extern "C" __global__ void count_atomically(u32* counter) { atomicAdd(counter, 1u); }

// Planted: the increment is not atomic.
extern "C" __global__ void count_plainly(u32* counter) { *counter = *counter + 1; }

// Each warp adds its lanes' numbers, once by a shuffle tree and once by asking who voted.
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

// For each lane, which lanes of its warp hold the same value.
extern "C" __global__ void warp_match(const u32* values, u32* same) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    same[at] = __match_any_sync(~0u, values[at]);
}

// Planted: two branches of one block wait at two barriers.
extern "C" __global__ void barriers_apart(u32* values) {
    if (threadIdx.x % 2) {
        __syncthreads();
        values[threadIdx.x] = 1;
    } else {
        __syncthreads();
        values[threadIdx.x] = 2;
    }
}

// Planted: half a warp waits at a barrier, the other half in a ballot that wants all lanes.
extern "C" __global__ void barrier_against_ballot(u32* values) {
    if (threadIdx.x % WARP < 16) __syncthreads();
    else values[threadIdx.x] = __ballot_sync(~0u, 1);
}

// Planted: a lane takes part in an operation whose mask leaves it out.
extern "C" __global__ void ballot_outside_mask(u32* values) {
    values[threadIdx.x] = __ballot_sync(0xffffu, 1);
}

// Planted: a shuffle reads a lane that its mask leaves out.
extern "C" __global__ void shuffle_outside_mask(u32* values) {
    if (threadIdx.x < 16) values[threadIdx.x] = __shfl_sync(0xffffu, values[threadIdx.x], 20);
}

// Planted: a loop that waits for what no lane does.
extern "C" __global__ void spin_for_ever(u32* values) {
    while (*static_cast<volatile u32*>(values) == 0) __nanosleep(20);
}

// `fold`, to be held against the host's.
extern "C" __global__ void fold_numbers(const u64* numbers, u64* folded, u32 bits) {
    folded[threadIdx.x] = fold(numbers[threadIdx.x], bits);
}
