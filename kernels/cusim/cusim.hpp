// cusim executes CUDA kernels on the CPU, so that they can be tested without a GPU.
//
// A kernel's source is compiled as C++ against this header, which defines the CUDA names that kernels use:
//
// - Every CUDA thread is a fiber with its own stack. All fibers of a launch share one OS thread, and switches
//   happen only inside the functions below. Only dynamic shared memory is supported: blocks overlap in time,
//   so a `__shared__` variable would be shared between blocks.
// - A warp operation (ballot, shuffle, match, __syncwarp) parks a lane until every live lane of its mask has
//   arrived, and __syncthreads until every live lane of the block has.
// - With a seed other than 0, lanes, warps, blocks, and kernels of several streams are preempted at random,
//   reproducibly, at each memory access. Kernels are compiled with -fsanitize=thread, so that the compiler
//   calls a hook of access.cpp before every load and store. A missing barrier, or a read-modify-write that is
//   not atomic, therefore gives a wrong result under some seed.
// - With a seed other than 0, memory order is weak (memory.hpp): what `load` of common.cuh returns may be old
//   unless fences rule that out. A missing fence therefore gives a wrong result under some seed.
// - Behaviour that is undefined in CUDA, or would hang a GPU, ends the launch with an error that names the
//   block and the lane: a lane outside its own mask, lanes of one mask in different operations, lanes at
//   different barriers, a barrier that some lanes never reach, an endless loop.
//
// Time is not modelled. All state is per OS thread, and a launch stays on one OS thread, so tests may launch
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

enum class Op : uint8_t { Sync, Ballot, Match, Shuffle, ShuffleDown, ShuffleXor };

// A lane's part in a warp operation. For a shuffle, `argument` is the source lane, the distance or the mask,
// and `width` the size of the groups of lanes.
struct Request {
    Op op;
    uint32_t mask;
    uint64_t value = 0;
    uint32_t argument = 0;
    uint32_t width = 32;
};

uint64_t warp_operation(const Request& request);
int block_barrier(bool predicate, int line);  // returns the number of lanes whose predicate held
void preemption_point();
uint64_t load_bits(const void* at, size_t bytes);
void store_bits(void* at, uint64_t value, size_t bytes);
void fence();
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

template <class T> T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T> T load(const T* at) { return from_bits<T>(load_bits(at, sizeof(T))); }
template <class T> void store(T* at, T value) { store_bits(at, to_bits(value), sizeof(T)); }

template <class T> T shuffle(Op op, uint32_t mask, T value, uint32_t argument, uint32_t width) {
    return from_bits<T>(warp_operation({op, mask, to_bits(value), argument, width}));
}

// A kernel's name, the bytes of its arguments, and a function that calls it with arguments behind pointers, as cuLaunchKernel takes them.
struct Kernel {
    const char* name;
    size_t argument_bytes;
    void (*call)(void** arguments);
};

template <auto Function> struct Call;
template <class... Args, void (*Function)(Args...)> struct Call<Function> {
    static constexpr size_t argument_bytes = (sizeof(Args) + ... + 0);
    template <size_t... I> static void apply(void** arguments, std::index_sequence<I...>) {
        Function(*static_cast<Args*>(arguments[I])...);
    }
    static void call(void** arguments) { apply(arguments, std::index_sequence_for<Args...>{}); }
};

// Every kernel that can be launched (kernels.cpp).
extern const Kernel KERNELS[];
extern const size_t KERNEL_COUNT;

}  // namespace cusim

#define threadIdx (cusim::thread_index())
#define blockIdx (cusim::block_index())
#define blockDim (cusim::block_size())
#define gridDim (cusim::grid_size())

// The source line identifies a barrier. The address of the call does not, because the compiler may duplicate
// the call.
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
// Each operation is rounded: cusim compiles without contraction.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline void __threadfence() { cusim::fence(); }
inline void __nanosleep(unsigned) { cusim::preemption_point(); }

// Atomics. Defined in access.cpp, which is not instrumented, so that they are not preempted inside.
unsigned atomicAdd(unsigned* at, unsigned by);
unsigned long long atomicExch(unsigned long long* at, unsigned long long value);
unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long value);
