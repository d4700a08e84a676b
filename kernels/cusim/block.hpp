// The state of a launch, its blocks, warps and lanes; shared by cusim.cpp, launch.cpp and access.cpp.
#pragma once

#include <memory>
#include <vector>

#include "cusim.hpp"
#include "fiber.hpp"
#include "memory.hpp"

namespace cusim {

constexpr unsigned WARP = 32;
constexpr int NO_LINE = -1;

struct Warp;
struct Block;

struct Lane {
    Fiber fiber;
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint32_t number = 0;
    dim3 index;
    Request request{Op::Sync, 0};
    uint64_t result = 0;
    View view;              // the lane also sees the views of its warp and of its block
    uint64_t acquired = 0;  // the latest `released` of the versions that it has read; its next fence uses it
    uint64_t released = 0;  // the time of its last fence

    uint32_t bit() const { return 1u << number; }
    // The time of the oldest write to an address that this lane may still read.
    uint64_t seen(const void* address) const;
    void has_read(const void* address, const Version& version) {
        view.see(address, version.time);
        acquired = std::max(acquired, version.released);
    }
};

struct Warp {
    // Sets of lanes: not yet finished, able to run, parked in a warp operation, parked at the block's
    // barrier.
    uint32_t live = 0, runnable = 0, in_operation = 0, at_barrier = 0;
    View view;  // what all its lanes see since its last __syncwarp
    Lane lanes[WARP];
};

// What the blocks of a launch have in common.
struct Launch {
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    dim3 grid, block;
    size_t shared_bytes = 0;
    Random random;
    uint64_t begun = 0;  // the time up to which its lanes see all writes
    uint64_t accesses = 0;
    bool failed = false;
    char message[512] = "";
    // The blocks that have not begun (the last one begins next), and those that take turns now.
    std::vector<size_t> waiting;
    std::vector<std::unique_ptr<Block>> resident;

    unsigned threads() const { return block.x * block.y * block.z; }
};

// One block that runs or has run; its memory is reused by later ones.
struct Block {
    Launch* launch = nullptr;
    dim3 index;
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    Stacks stacks;
    Fiber scheduler;
    Lane* running = nullptr;
    int barrier_line = NO_LINE, barrier_count = 0, barrier_result = 0;
    View view;  // what all its lanes see since its last __syncthreads

    // Starts the block with this number. Returns false if the stacks cannot be allocated.
    bool begin(Launch& of, size_t number);
    // Lets one of its warps run until the next switch. Returns false once all lanes are done, or one has
    // failed.
    bool step();
};

inline uint64_t Lane::seen(const void* address) const {
    return std::max({view.of(address), warp->view.of(address), block->view.of(address)});
}

// The lane that runs on this OS thread; null outside of a launch.
Lane* running_lane();

// Records the first failure of a launch. Later ones are ignored.
__attribute__((format(printf, 2, 3))) void report(Launch& launch, const char* format, ...);

}  // namespace cusim
