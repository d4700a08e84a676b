// Launches, and the interface to Rust. A few blocks of a launch are resident at a time and take turns at
// random.
//
// A launch is advanced in steps. So one OS thread can run several launches at once, as a device runs kernels
// of several streams. The caller decides how they interleave.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "block.hpp"

namespace cusim {
namespace {

// Blocks of one launch that overlap in time at most. Without preemption blocks do not overlap.
constexpr size_t MOST_RESIDENT = 4;

// Finished blocks, whose stacks are reused.
thread_local std::vector<std::unique_ptr<Block>> spare;

// Spreads small seeds over all bits. 0 stays 0 and means no preemption.
uint64_t spread(uint64_t seed) {
    seed *= 0x9E3779B97F4A7C15ull;
    return seed ^ seed >> 32;
}

// The numbers of the blocks. They begin in reverse of this order.
std::vector<size_t> block_order(size_t blocks, Random& random) {
    std::vector<size_t> order(blocks);
    std::iota(order.rbegin(), order.rend(), size_t{0});
    if (random.state)
        for (size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
    return order;
}

void begin_blocks(Launch& launch) {
    const size_t most = launch.random.state ? MOST_RESIDENT : 1;
    while (launch.resident.size() < most && !launch.waiting.empty()) {
        auto block = spare.empty() ? std::make_unique<Block>() : std::move(spare.back());
        if (!spare.empty()) spare.pop_back();
        if (!block->begin(launch, launch.waiting.back()))
            return report(launch, "no memory for the stacks of %u threads", launch.threads());
        launch.waiting.pop_back();
        launch.resident.push_back(std::move(block));
    }
}

// One step of one block. False when the launch is over.
bool step(Launch& launch) {
    begin_blocks(launch);
    if (launch.failed || launch.resident.empty()) return false;
    const size_t turn = launch.random.state ? launch.random.next() % launch.resident.size() : 0;
    if (launch.resident[turn]->step()) return true;
    if (launch.failed) return false;
    std::swap(launch.resident[turn], launch.resident.back());
    spare.push_back(std::move(launch.resident.back()));
    launch.resident.pop_back();
    return true;
}

// The kernel of a name, or null.
const Kernel* find(const char* name) {
    const Kernel* end = KERNELS + KERNEL_COUNT;
    const auto has_name = [&](const Kernel& kernel) { return std::strcmp(kernel.name, name) == 0; };
    const Kernel* kernel = std::find_if(KERNELS, end, has_name);
    return kernel == end ? nullptr : kernel;
}

}  // namespace
}  // namespace cusim

enum { CUSIM_RUNNING = 0, CUSIM_DONE = 1, CUSIM_FAILED = 2 };

// Begins a launch; `arguments` must live until it is ended. If it returns null, `message` holds the reason.
extern "C" cusim::Launch* cusim_begin(const char* name, const unsigned grid[3], const unsigned block[3],
                                      size_t shared_bytes, void** arguments, uint64_t seed, char* message,
                                      size_t message_bytes) {
    using namespace cusim;
    const auto refuse = [&](const char* why) {
        snprintf(message, message_bytes, "%s", why);
        return nullptr;
    };
    const Kernel* kernel = find(name);
    if (!kernel) return refuse("no kernel of this name");
    const unsigned threads = block[0] * block[1] * block[2];
    if (threads == 0 || threads > 1024) return refuse("a block has 1 to 1024 threads");

    auto launch = std::make_unique<Launch>();
    launch->kernel = kernel;
    launch->arguments = arguments;
    launch->grid = {grid[0], grid[1], grid[2]};
    launch->block = {block[0], block[1], block[2]};
    launch->shared_bytes = shared_bytes;
    launch->random.state = spread(seed);
    launch->begun = memory().now();
    launch->waiting = block_order(size_t{grid[0]} * grid[1] * grid[2], launch->random);
    return launch.release();
}

// Takes at most `steps` steps; always called on the thread that began the launch. On failure `message` holds
// the reason.
extern "C" int cusim_advance(cusim::Launch* launch, uint64_t steps, char* message, size_t message_bytes) {
    for (; steps; --steps) {
        if (cusim::step(*launch)) continue;
        if (!launch->failed) return CUSIM_DONE;
        snprintf(message, message_bytes, "%s", launch->message);
        return CUSIM_FAILED;
    }
    return CUSIM_RUNNING;
}

extern "C" void cusim_end(cusim::Launch* launch) { delete launch; }

// The bytes of a kernel's arguments, or 0 if there is no such kernel.
extern "C" size_t cusim_argument_bytes(const char* name) {
    const cusim::Kernel* kernel = cusim::find(name);
    return kernel ? kernel->argument_bytes : 0;
}
