// How kernels access memory. `load`, `store`, fences and atomics follow the model of memory.hpp. Hooks run
// before every plain load and store. This file is not instrumented, so no preemption happens inside its
// functions.
#include <cstring>
#include <optional>

#include "block.hpp"

namespace cusim {
namespace {

uint64_t read(const void* at, size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, at, bytes);
    return value;
}

// The lane that accesses memory; null if the model of memory.hpp is off (seed 0, or outside of a launch).
Lane* weak_lane() {
    Lane* lane = running_lane();
    return lane && lane->block->launch->random.state ? lane : nullptr;
}

// Preemption is possible before the operation and not within it, because the lanes of a launch share one OS
// thread. `change` returns the new value, or nothing if memory keeps the old one.
template <class T, class F> T read_modify_write(T* at, F change) {
    preemption_point();
    const T old = *at;
    const std::optional<T> value = change(old);
    if (Lane* lane = weak_lane()) {
        const Version version = memory().latest(at, old);
        lane->has_read(at, version);
        if (value) {
            const uint64_t released = std::max(lane->released, version.released);
            lane->view.see(at, memory().store(at, old, *value, released));
        }
    }
    if (value) *at = *value;
    return old;
}

}  // namespace

Memory& memory() {
    thread_local Memory memory;
    return memory;
}

uint64_t load_bits(const void* at, size_t bytes) {
    preemption_point();
    const uint64_t current = read(at, bytes);
    Lane* lane = weak_lane();
    if (!lane) return current;
    const Version version = memory().load(at, current, lane->seen(at), lane->block->launch->random);
    lane->has_read(at, version);
    return version.value;
}

void store_bits(void* at, uint64_t value, size_t bytes) {
    preemption_point();
    if (Lane* lane = weak_lane())
        lane->view.see(at, memory().store(at, read(at, bytes), value, lane->released));
    std::memcpy(at, &value, bytes);
}

void fence() {
    preemption_point();
    Lane* lane = weak_lane();
    if (!lane) return;
    lane->view.raise(lane->acquired);
    lane->released = memory().now();
}

}  // namespace cusim

unsigned atomicAdd(unsigned* at, unsigned by) {
    return cusim::read_modify_write(at, [=](unsigned old) { return std::optional(old + by); });
}
unsigned long long atomicExch(unsigned long long* at, unsigned long long value) {
    return cusim::read_modify_write(at, [=](unsigned long long) { return std::optional(value); });
}
unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected, unsigned long long value) {
    return cusim::read_modify_write(
        at, [=](unsigned long long old) { return old == expected ? std::optional(value) : std::nullopt; });
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
