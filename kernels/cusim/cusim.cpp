// The scheduler of cusim: fibers, warp operations, barriers, preemption. See cusim.hpp for the idea.
//
// A block runs to its end before the next begins. Its lanes switch among themselves without the scheduler
// while one of their warp can run; the scheduler takes the warps in turn, opens the barrier when every
// live lane stands at it, and calls a round in which nothing can run a deadlock.
#include "cusim.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "fiber.hpp"

#if defined(__x86_64__)
asm(".text\n.globl cusim_switch\n.type cusim_switch,@function\ncusim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size cusim_switch,.-cusim_switch\n");
#endif

namespace cusim {
namespace {

constexpr unsigned WARP = 32;
constexpr int NO_LINE = -1;
constexpr uint64_t MOST_ACCESSES = 100'000'000;  // of one launch: a kernel that loops for ever ends too

// ---- State of a launch, all of it on the launching thread. ----

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

struct Launch {
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    dim3 grid, block, block_index;
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    Stacks stacks;
    Fiber scheduler;
    Lane* running = nullptr;
    Random random;
    uint64_t accesses = 0;
    int barrier_line = NO_LINE, barrier_count = 0, barrier_result = 0;
    bool failed = false;
    char message[512] = "";
};

thread_local Launch* launch_of_thread = nullptr;

uint32_t lowest(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)); }

void run(Lane& lane) {
    launch_of_thread->running = &lane;
    switch_fiber(launch_of_thread->scheduler, lane.fiber);
}

void back_to_scheduler(Lane& from) {
    launch_of_thread->running = nullptr;
    switch_fiber(from.fiber, launch_of_thread->scheduler);
}

// Leaves a lane for the next one of its warp that can run, or for the scheduler where there is none.
void yield(Lane& from) {
    const uint32_t runnable = from.warp->runnable;
    const uint32_t later = from.number == WARP - 1 ? 0 : runnable & (~0u << (from.number + 1));
    const uint32_t candidates = later ? later : runnable;
    if (!candidates) return back_to_scheduler(from);
    Lane& to = from.warp->lanes[lowest(candidates)];
    if (&to == &from) return;
    launch_of_thread->running = &to;
    switch_fiber(from.fiber, to.fiber);
}

// Records what went wrong first. Called by the scheduler, or by fail() below.
__attribute__((format(printf, 1, 2))) void report(const char* format, ...) {
    Launch& launch = *launch_of_thread;
    if (launch.failed) return;
    launch.failed = true;
    va_list values;
    va_start(values, format);
    vsnprintf(launch.message, sizeof launch.message, format, values);
    va_end(values);
}

// Ends the launch from within a lane: the scheduler never comes back to any of them.
[[noreturn]] void fail(Lane& lane, const char* what) {
    const dim3 block = launch_of_thread->block_index;
    report("%s (block %u,%u,%u thread %u,%u,%u lane %u)", what, block.x, block.y, block.z, lane.index.x,
           lane.index.y, lane.index.z, lane.number);
    back_to_scheduler(lane);
    __builtin_unreachable();
}

// ---- Warp operations. ----

uint64_t matching(const Warp& warp, uint32_t present, uint64_t value) {
    uint32_t same = 0;
    for (uint32_t rest = present; rest; rest &= rest - 1) {
        const Lane& other = warp.lanes[lowest(rest)];
        if (other.request.value == value) same |= other.bit();
    }
    return same;
}

// Which lane a shuffle reads; its own where the group ends, as CUDA has it.
uint32_t shuffle_source(const Lane& lane) {
    const uint32_t by = lane.request.argument, width = lane.request.width;
    const uint32_t base = lane.number & ~(width - 1);
    switch (lane.request.op) {
    case Op::Shuffle: return base + (by & (width - 1));
    case Op::ShuffleUp: return lane.number - base >= by ? lane.number - by : lane.number;
    case Op::ShuffleDown: return lane.number - base + by < width ? lane.number + by : lane.number;
    default: return (lane.number ^ by) < base + width ? lane.number ^ by : lane.number;
    }
}

void complete(Warp& warp, uint32_t present, Lane& last) {
    uint32_t votes = 0;
    for (uint32_t rest = present; rest; rest &= rest - 1) {
        Lane& lane = warp.lanes[lowest(rest)];
        if (lane.request.op != last.request.op || lane.request.mask != last.request.mask)
            fail(lane, "lanes of one mask meet in different warp operations");
        if (lane.request.value & 1) votes |= lane.bit();
    }
    for (uint32_t rest = present; rest; rest &= rest - 1) {
        Lane& lane = warp.lanes[lowest(rest)];
        if (lane.request.op == Op::Sync) continue;
        if (lane.request.op == Op::Ballot) lane.result = votes;
        else if (lane.request.op == Op::Match) lane.result = matching(warp, present, lane.request.value);
        else {
            const uint32_t source = shuffle_source(lane);
            if (!(present >> source & 1)) fail(lane, "a shuffle reads a lane outside its mask");
            lane.result = warp.lanes[source].request.value;
        }
    }
    warp.in_operation &= ~present;
    warp.runnable |= present;
}

// A lane that returns may have been the last one that others of its warp waited for.
void finish(Lane& lane) {
    Warp& warp = *lane.warp;
    warp.live &= ~lane.bit();
    warp.runnable &= ~lane.bit();
    for (uint32_t rest = warp.in_operation; rest; rest &= rest - 1) {
        Lane& waiting = warp.lanes[lowest(rest)];
        const uint32_t awaited = waiting.request.mask & warp.live;
        if ((warp.in_operation & awaited) == awaited) complete(warp, awaited, waiting);
        rest &= warp.in_operation | waiting.bit();
    }
}

void lane_entry() {
    Launch& launch = *launch_of_thread;
    Lane& lane = *launch.running;
    launch.kernel->call(launch.arguments);
    finish(lane);
    yield(lane);
    __builtin_unreachable();
}

// ---- The scheduler. ----

bool prepare_block(unsigned threads) {
    Launch& launch = *launch_of_thread;
    launch.warps.resize((threads + WARP - 1) / WARP);
    std::fill(launch.shared.begin(), launch.shared.end(), 0xA5);  // so that reading before writing shows
    launch.barrier_line = NO_LINE;
    launch.barrier_count = 0;
    if (!launch.stacks.reserve(threads)) return false;
    for (unsigned thread = 0; thread < threads; ++thread) {
        Warp& warp = launch.warps[thread / WARP];
        if (thread % WARP == 0) warp.live = warp.runnable = warp.in_operation = warp.at_barrier = 0;
        Lane& lane = warp.lanes[thread % WARP];
        lane.warp = &warp;
        lane.number = thread % WARP;
        lane.index = {thread % launch.block.x, thread / launch.block.x % launch.block.y,
                      thread / (launch.block.x * launch.block.y)};
        warp.live |= lane.bit();
        warp.runnable |= lane.bit();
        prepare(lane.fiber, launch.stacks.of(thread), lane_entry);
    }
    return true;
}

bool open_barrier() {
    Launch& launch = *launch_of_thread;
    for (const Warp& warp : launch.warps)
        if (warp.at_barrier != warp.live) return false;
    launch.barrier_result = launch.barrier_count;
    launch.barrier_count = 0;
    launch.barrier_line = NO_LINE;
    for (Warp& warp : launch.warps) {
        warp.runnable = warp.at_barrier;
        warp.at_barrier = 0;
    }
    return true;
}

void report_deadlock() {
    const Launch& launch = *launch_of_thread;
    const dim3 block = launch.block_index;
    for (size_t i = 0; i < launch.warps.size(); ++i) {
        const Warp& warp = launch.warps[i];
        if (!warp.live) continue;
        report("deadlock: a barrier or warp operation that some lanes never reach (block %u,%u,%u warp %zu: "
               "lanes %08x live, %08x at __syncthreads, %08x in a warp operation)",
               block.x, block.y, block.z, i, warp.live, warp.at_barrier, warp.in_operation);
    }
}

void run_block() {
    Launch& launch = *launch_of_thread;
    const size_t warps = launch.warps.size();
    for (;;) {
        bool live = false, ran = false;
        const size_t first = launch.random.state ? launch.random.next() % warps : 0;
        for (size_t i = 0; i < warps; ++i) {
            Warp& warp = launch.warps[(first + i) % warps];
            if (warp.runnable) {
                ran = true;
                run(warp.lanes[lowest(warp.runnable)]);
                if (launch.failed) return;
            }
            live |= warp.live != 0;
        }
        if (!live) return;
        if (!ran && !open_barrier()) return report_deadlock();
    }
}

std::vector<size_t> block_order(size_t blocks, Random random) {
    std::vector<size_t> order(blocks);
    std::iota(order.begin(), order.end(), size_t{0});
    if (random.state)
        for (size_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);
    return order;
}

// Spreads small seeds over all bits; 0 stays 0, which means no preemption.
uint64_t spread(uint64_t seed) {
    seed *= 0x9E3779B97F4A7C15ull;
    return seed ^ seed >> 32;
}

void run_blocks(Launch& launch, unsigned threads) {
    const size_t blocks = size_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    for (size_t block : block_order(blocks, launch.random)) {
        const unsigned row = static_cast<unsigned>(block / launch.grid.x);
        launch.block_index.x = static_cast<unsigned>(block % launch.grid.x);
        launch.block_index.y = row % launch.grid.y;
        launch.block_index.z = row / launch.grid.y;
        if (!prepare_block(threads)) return report("no memory for the stacks of %u threads", threads);
        run_block();
        if (launch.failed) return;
    }
}

}  // namespace

// ---- What kernels call. ----

uint64_t warp_operation(const Request& request) {
    Lane& lane = *launch_of_thread->running;
    Warp& warp = *lane.warp;
    if (!(request.mask & lane.bit())) fail(lane, "a lane is not in its own mask");
    lane.request = request;
    warp.in_operation |= lane.bit();
    warp.runnable &= ~lane.bit();
    const uint32_t awaited = request.mask & warp.live;  // finished lanes take no part
    if ((warp.in_operation & awaited) == awaited) complete(warp, awaited, lane);
    else yield(lane);
    return lane.result;
}

int block_barrier(bool predicate, int line) {
    Launch& launch = *launch_of_thread;
    Lane& lane = *launch.running;
    if (launch.barrier_line != NO_LINE && launch.barrier_line != line)
        fail(lane, "lanes of one block wait at different barriers");
    launch.barrier_line = line;
    launch.barrier_count += predicate;
    lane.warp->at_barrier |= lane.bit();
    lane.warp->runnable &= ~lane.bit();
    yield(lane);
    return launch.barrier_result;
}

// One access in 16 yields to another lane of the warp, one in 64 to another warp.
void preemption_point() {
    Launch* launch = launch_of_thread;
    if (!launch || !launch->running) return;
    Lane& lane = *launch->running;
    if (++launch->accesses > MOST_ACCESSES) fail(lane, "too many memory accesses: an endless loop");
    if (!launch->random.state) return;
    const uint32_t draw = launch->random.next();
    if (draw % 16 == 0) yield(lane);
    else if (draw % 64 == 1) back_to_scheduler(lane);
}

void* dynamic_shared() { return launch_of_thread->shared.data(); }
dim3 thread_index() { return launch_of_thread->running->index; }
dim3 block_index() { return launch_of_thread->block_index; }
dim3 block_size() { return launch_of_thread->block; }
dim3 grid_size() { return launch_of_thread->grid; }

}  // namespace cusim

// Runs one launch on the calling thread. 0: done. Else the reason lies in `message`, ended by a zero.
extern "C" int cusim_launch(const char* name, const unsigned grid[3], const unsigned block[3],
                            size_t shared_bytes, void** arguments, uint64_t seed, char* message,
                            size_t message_bytes) {
    using namespace cusim;
    const auto refuse = [&](const char* why) {
        snprintf(message, message_bytes, "%s", why);
        return 1;
    };
    const Kernel* end = KERNELS + KERNEL_COUNT;
    const auto has_name = [&](const Kernel& kernel) { return std::strcmp(kernel.name, name) == 0; };
    const Kernel* kernel = std::find_if(KERNELS, end, has_name);
    if (kernel == end) return refuse("no kernel of this name");
    const unsigned threads = block[0] * block[1] * block[2];
    if (threads == 0 || threads > 1024) return refuse("a block has 1 to 1024 threads");

    const auto launch = std::make_unique<Launch>();
    launch->kernel = kernel;
    launch->arguments = arguments;
    launch->grid = {grid[0], grid[1], grid[2]};
    launch->block = {block[0], block[1], block[2]};
    launch->shared.resize(shared_bytes);
    launch->random.state = spread(seed);
    launch_of_thread = launch.get();
    run_blocks(*launch, threads);
    launch_of_thread = nullptr;
    return launch->failed ? refuse(launch->message) : 0;
}
