// cusim executes CUDA kernels on a CPU, so that they are tested where there is no GPU.
//
// A kernel's source is compiled as C++ against this header, which gives CUDA's names a meaning:
//
// - every CUDA thread is a fiber with its own stack; all fibers of a launch share one OS thread, and a switch
//   happens only where this header lets it happen. Shared memory is the dynamic one alone: there is no
//   `__shared__` here, because blocks overlap;
// - a warp operation (ballot, shuffle, match, __syncwarp) parks a lane until every live lane of its mask
//   has come, and __syncthreads until every live lane of the block has;
// - with a seed other than 0, lanes, warps and blocks, and kernels of several streams, are preempted at
//   random, reproducibly, at each of their memory accesses: kernels are compiled with -fsanitize=thread, and access.cpp supplies the hooks that
//   the compiler then calls before every load and store. So a missing barrier, or a read-modify-write
//   that is not atomic, gives a wrong result under some seed;
// - what CUDA calls undefined and what would hang a GPU ends the launch with an error that names the
//   block and the lane: a lane outside its own mask, lanes of one mask in different operations, lanes at
//   different barriers, a barrier that some lanes never reach, a loop without end.
//
// Not modelled: weak memory order, and time itself. A launch lives on one thread alone, so tests may launch
// from several threads at once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

namespace cusim {

enum class Op : uint8_t { Sync, Ballot, Match, Shuffle, ShuffleUp, ShuffleDown, ShuffleXor };

// What a lane brings to a warp operation. `argument` is a shuffle's source lane, distance or mask, and
// `width` its group of lanes.
struct Request {
    Op op;
    uint32_t mask;
    uint64_t value = 0;
    uint32_t argument = 0;
    uint32_t width = 32;
};

uint64_t warp_operation(const Request& request);
int block_barrier(bool predicate, int line);  // returns for how many lanes the predicate held
void preemption_point();
void* dynamic_shared();

dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();

template <class T> uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> T shuffle(Op op, uint32_t mask, T value, uint32_t argument, uint32_t width) {
    const uint64_t bits = warp_operation({op, mask, to_bits(value), argument, width});
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A kernel as a launch finds it: a name, and a call with its arguments behind pointers, as cuLaunchKernel
// takes them.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
};

template <auto Function> struct Call;
template <class... Args, void (*Function)(Args...)> struct Call<Function> {
    template <size_t... I> static void apply(void** arguments, std::index_sequence<I...>) {
        Function(*static_cast<Args*>(arguments[I])...);
    }
    static void call(void** arguments) { apply(arguments, std::index_sequence_for<Args...>{}); }
};

// Every kernel that can be launched; kernels.cpp holds the list.
extern const Kernel KERNELS[];
extern const size_t KERNEL_COUNT;

}  // namespace cusim

#define threadIdx (cusim::thread_index())
#define blockIdx (cusim::block_index())
#define blockDim (cusim::block_size())
#define gridDim (cusim::grid_size())

// A barrier is told from another by its line: the compiler may copy a call, and its address with it.
inline void __syncthreads(int line = __builtin_LINE()) { cusim::block_barrier(false, line); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) {
    return cusim::block_barrier(p != 0, line);
}
inline int __syncthreads_or(int p, int line = __builtin_LINE()) {
    return cusim::block_barrier(p != 0, line) > 0;
}

inline void __syncwarp(unsigned mask = ~0u) { cusim::warp_operation({cusim::Op::Sync, mask}); }
inline unsigned __ballot_sync(unsigned mask, int p) {
    return static_cast<unsigned>(cusim::warp_operation({cusim::Op::Ballot, mask, p != 0}));
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    return static_cast<unsigned>(cusim::warp_operation({cusim::Op::Match, mask, cusim::to_bits(value)}));
}
template <class T> T __shfl_sync(unsigned mask, T value, unsigned lane, unsigned width = 32) {
    return cusim::shuffle(cusim::Op::Shuffle, mask, value, lane, width);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, unsigned width = 32) {
    return cusim::shuffle(cusim::Op::ShuffleUp, mask, value, by, width);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, unsigned width = 32) {
    return cusim::shuffle(cusim::Op::ShuffleDown, mask, value, by, width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned by, unsigned width = 32) {
    return cusim::shuffle(cusim::Op::ShuffleXor, mask, value, by, width);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
// Rounded each; kernels are compiled here with no contraction, as these ask for on a GPU.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline void __threadfence() { cusim::preemption_point(); }
inline void __threadfence_block() { cusim::preemption_point(); }
inline void __nanosleep(unsigned) { cusim::preemption_point(); }

// Atomics. Defined in access.cpp: there the compiler puts no preemption between their load and store.
unsigned atomicAdd(unsigned* at, unsigned by);
unsigned long long atomicAdd(unsigned long long* at, unsigned long long by);
float atomicAdd(float* at, float by);
unsigned atomicMax(unsigned* at, unsigned value);
unsigned atomicMin(unsigned* at, unsigned value);
unsigned atomicOr(unsigned* at, unsigned bits);
unsigned atomicExch(unsigned* at, unsigned value);
unsigned long long atomicExch(unsigned long long* at, unsigned long long value);
unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value);
unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long value);
