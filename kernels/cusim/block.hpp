// What cusim.cpp and launch.cpp share: the state of a launch, of its blocks, warps and lanes.
#pragma once

#include <memory>
#include <vector>

#include "cusim.hpp"
#include "fiber.hpp"

namespace cusim {

constexpr unsigned WARP = 32;
constexpr int NO_LINE = -1;

struct Warp;

struct Lane {
    Fiber fiber;
    Warp* warp = nullptr;
    uint32_t number = 0;
    dim3 index;
    Request request{Op::Sync, 0};
    uint64_t result = 0;

    uint32_t bit() const { return 1u << number; }
};

// Sets of lanes: those not yet finished, those that can run, those parked in a warp operation and at the
// block's barrier.
struct Warp {
    uint32_t live = 0, runnable = 0, in_operation = 0, at_barrier = 0;
    Lane lanes[WARP];
};

struct Random {
    uint64_t state = 0;  // 0: no preemption
    uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<uint32_t>(state >> 32);
    }
};

struct Block;

// What the blocks of a launch have in common.
struct Launch {
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    dim3 grid, block;
    size_t shared_bytes = 0;
    Random random;
    uint64_t accesses = 0;
    bool failed = false;
    char message[512] = "";
    // The blocks to come, last first, and those that take turns now.
    std::vector<size_t> waiting;
    std::vector<std::unique_ptr<Block>> resident;

    unsigned threads() const { return block.x * block.y * block.z; }
};

// One block that runs or has run; its memory serves another one after it.
struct Block {
    Launch* launch = nullptr;
    dim3 index;
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    Stacks stacks;
    Fiber scheduler;
    Lane* running = nullptr;
    int barrier_line = NO_LINE, barrier_count = 0, barrier_result = 0;

    // Makes it the block of this number. False where there is no memory for the stacks.
    bool begin(Launch& of, size_t number);
    // Lets one of its warps run until the next switch. False once all lanes are done, or one has failed.
    bool step();
};

// Records what went wrong first.
__attribute__((format(printf, 2, 3))) void report(Launch& launch, const char* format, ...);

}  // namespace cusim
