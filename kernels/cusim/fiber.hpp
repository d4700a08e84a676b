// Fibers: several stacks on one OS thread, and a switch between them.
//
// On x86-64 the switch saves the callee-saved registers and swaps the stack pointer, which takes a few
// nanoseconds. Elsewhere ucontext does it, with a system call.
#pragma once

#include <cstddef>
#include <sys/mman.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cusim {

constexpr size_t STACK_BYTES = 64 << 10;

#if defined(__x86_64__)
struct Fiber {
    void* stack_pointer = nullptr;
};

// Defined in cusim.cpp.
extern "C" void cusim_switch(void** save, void* to);

inline void switch_fiber(Fiber& from, Fiber& to) { cusim_switch(&from.stack_pointer, to.stack_pointer); }

// Makes the fiber begin at `entry`, which must never return, on the STACK_BYTES from `stack`.
inline void prepare(Fiber& fiber, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;  // aligns the stack as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
}
#else
struct Fiber {
    ucontext_t context;
};

inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

// Makes the fiber begin at `entry`, which must never return, on the STACK_BYTES from `stack`.
inline void prepare(Fiber& fiber, char* stack, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}
#endif

// The stacks of a block's lanes. They are kept for the next block that runs in the same `Block`.
class Stacks {
  public:
    ~Stacks() { release(); }
    bool reserve(size_t lanes) {
        if (lanes <= lanes_) return true;
        release();
        void* at = mmap(nullptr, lanes * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return false;
        memory_ = static_cast<char*>(at);
        lanes_ = lanes;
        return true;
    }
    char* of(size_t lane) { return memory_ + lane * STACK_BYTES; }

  private:
    void release() {
        if (memory_) munmap(memory_, lanes_ * STACK_BYTES);
        memory_ = nullptr;
        lanes_ = 0;
    }
    char* memory_ = nullptr;
    size_t lanes_ = 0;
};

}  // namespace cusim
