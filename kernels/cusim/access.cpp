// How kernels touch memory: atomics, and the hooks before every plain load and store. This file is not
// instrumented, so nothing preempts within them.
#include "cusim.hpp"

#include <algorithm>

namespace {

// A preemption before, none within: the lanes of a launch share one OS thread.
template <class T, class F> T read_modify_write(T* at, F change) {
    cusim::preemption_point();
    const T old = *at;
    *at = change(old);
    return old;
}

}  // namespace

unsigned atomicAdd(unsigned* at, unsigned by) {
    return read_modify_write(at, [=](unsigned old) { return old + by; });
}
unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) {
    return read_modify_write(at, [=](unsigned long long old) { return old + by; });
}
float atomicAdd(float* at, float by) {
    return read_modify_write(at, [=](float old) { return old + by; });
}
unsigned atomicMax(unsigned* at, unsigned value) {
    return read_modify_write(at, [=](unsigned old) { return std::max(old, value); });
}
unsigned atomicMin(unsigned* at, unsigned value) {
    return read_modify_write(at, [=](unsigned old) { return std::min(old, value); });
}
unsigned atomicOr(unsigned* at, unsigned bits) {
    return read_modify_write(at, [=](unsigned old) { return old | bits; });
}
unsigned atomicExch(unsigned* at, unsigned value) {
    return read_modify_write(at, [=](unsigned) { return value; });
}
unsigned long long atomicExch(unsigned long long* at, unsigned long long value) {
    return read_modify_write(at, [=](unsigned long long) { return value; });
}
unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
    return read_modify_write(at, [=](unsigned old) { return old == expected ? value : old; });
}
unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long value) {
    return read_modify_write(at, [=](unsigned long long old) { return old == expected ? value : old; });
}

// The hooks of -fsanitize=thread: the compiler calls one before each load and store of a kernel.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS_HOOK(name) \
    void __tsan_##name(void*) { cusim::preemption_point(); }
ACCESS_HOOK(read1)
ACCESS_HOOK(read2)
ACCESS_HOOK(read4)
ACCESS_HOOK(read8)
ACCESS_HOOK(read16)
ACCESS_HOOK(write1)
ACCESS_HOOK(write2)
ACCESS_HOOK(write4)
ACCESS_HOOK(write8)
ACCESS_HOOK(write16)
ACCESS_HOOK(unaligned_read2)
ACCESS_HOOK(unaligned_read4)
ACCESS_HOOK(unaligned_read8)
ACCESS_HOOK(unaligned_read16)
ACCESS_HOOK(unaligned_write2)
ACCESS_HOOK(unaligned_write4)
ACCESS_HOOK(unaligned_write8)
ACCESS_HOOK(unaligned_write16)
#undef ACCESS_HOOK
void __tsan_read_range(void*, unsigned long) { cusim::preemption_point(); }
void __tsan_write_range(void*, unsigned long) { cusim::preemption_point(); }
}
