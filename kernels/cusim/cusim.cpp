// One block of cusim: its fibers, warp operations, barriers, preemption. See cusim.hpp for the idea.
//
// The lanes of a warp switch to each other directly as long as one of them can run. A step of the scheduler
// lets one warp run. If none can, it opens the barrier, provided that every live lane is parked there;
// otherwise it reports a deadlock.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "block.hpp"

#if defined(__x86_64__)
asm(".text\n.globl cusim_switch\n.type cusim_switch,@function\ncusim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size cusim_switch,.-cusim_switch\n");
#endif

namespace cusim {
namespace {

constexpr uint64_t MOST_ACCESSES = 100'000'000;  // of one launch, so that an endless loop ends

thread_local Block* block_of_thread = nullptr;

uint32_t lowest(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)); }

void run(Lane& lane) {
    block_of_thread->running = &lane;
    switch_fiber(block_of_thread->scheduler, lane.fiber);
}

void back_to_scheduler(Lane& from) {
    block_of_thread->running = nullptr;
    switch_fiber(from.fiber, block_of_thread->scheduler);
}

// Switches to the next lane of the warp that can run, or to the scheduler if there is none.
void yield(Lane& from) {
    const uint32_t runnable = from.warp->runnable;
    const uint32_t later = from.number == WARP - 1 ? 0 : runnable & (~0u << (from.number + 1));
    const uint32_t candidates = later ? later : runnable;
    if (!candidates) return back_to_scheduler(from);
    Lane& to = from.warp->lanes[lowest(candidates)];
    if (&to == &from) return;
    block_of_thread->running = &to;
    switch_fiber(from.fiber, to.fiber);
}

// Ends the launch from within a lane: the scheduler never resumes any of its lanes.
[[noreturn]] void fail(Lane& lane, const char* what) {
    const dim3 block = lane.block->index, thread = lane.index;
    report(*lane.block->launch, "%s (block %u,%u,%u thread %u,%u,%u lane %u)", what, block.x, block.y,
           block.z, thread.x, thread.y, thread.z, lane.number);
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

// The lane that a shuffle reads. If that is after the end of the group, it is the lane itself, as in CUDA.
uint32_t shuffle_source(const Lane& lane) {
    const uint32_t by = lane.request.argument, width = lane.request.width;
    const uint32_t base = lane.number & ~(width - 1);
    switch (lane.request.op) {
    case Op::Shuffle: return base + (by & (width - 1));
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
        if (lane.request.op == Op::Sync) warp.view.absorb(lane.view);
        else if (lane.request.op == Op::Ballot) lane.result = votes;
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

// A lane returns from the kernel. Other lanes may have waited in an operation only for this one.
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
    Block& block = *block_of_thread;
    Lane& lane = *block.running;
    block.launch->kernel->call(block.launch->arguments);
    finish(lane);
    yield(lane);
    __builtin_unreachable();
}

// ---- The scheduler. ----

bool open_barrier(Block& block) {
    for (const Warp& warp : block.warps)
        if (warp.at_barrier != warp.live) return false;
    block.barrier_result = block.barrier_count;
    block.barrier_count = 0;
    block.barrier_line = NO_LINE;
    for (Warp& warp : block.warps) {
        for (uint32_t rest = warp.at_barrier; rest; rest &= rest - 1)
            block.view.absorb(warp.lanes[lowest(rest)].view);
        block.view.absorb(warp.view);
        warp.runnable = warp.at_barrier;
        warp.at_barrier = 0;
    }
    return true;
}

void report_deadlock(const Block& block) {
    for (size_t i = 0; i < block.warps.size(); ++i) {
        const Warp& warp = block.warps[i];
        if (!warp.live) continue;
        report(*block.launch,
               "deadlock: a barrier or warp operation that some lanes never reach (block %u,%u,%u warp %zu: "
               "lanes %08x live, %08x at __syncthreads, %08x in a warp operation)",
               block.index.x, block.index.y, block.index.z, i, warp.live, warp.at_barrier, warp.in_operation);
    }
}

}  // namespace

void report(Launch& launch, const char* format, ...) {
    if (launch.failed) return;
    launch.failed = true;
    va_list values;
    va_start(values, format);
    vsnprintf(launch.message, sizeof launch.message, format, values);
    va_end(values);
}

bool Block::begin(Launch& of, size_t number) {
    launch = &of;
    const unsigned threads = of.threads(), row = static_cast<unsigned>(number / of.grid.x);
    index = {static_cast<unsigned>(number % of.grid.x), row % of.grid.y, row / of.grid.y};
    shared.assign(of.shared_bytes, 0xA5);  // makes a read before the first write visible
    warps.resize((threads + WARP - 1) / WARP);
    barrier_line = NO_LINE;
    barrier_count = 0;
    view = {of.begun, {}};
    if (!stacks.reserve(threads)) return false;
    for (unsigned thread = 0; thread < threads; ++thread) {
        Warp& warp = warps[thread / WARP];
        if (thread % WARP == 0) {
            warp.live = warp.runnable = warp.in_operation = warp.at_barrier = 0;
            warp.view = {};
        }
        Lane& lane = warp.lanes[thread % WARP];
        lane.block = this;
        lane.warp = &warp;
        lane.number = thread % WARP;
        lane.index = {thread % of.block.x, thread / of.block.x % of.block.y,
                      thread / (of.block.x * of.block.y)};
        lane.view = {};
        lane.acquired = lane.released = 0;
        warp.live |= lane.bit();
        warp.runnable |= lane.bit();
        prepare(lane.fiber, stacks.of(thread), lane_entry);
    }
    return true;
}

bool Block::step() {
    bool live = false;
    const size_t count = warps.size(), first = launch->random.state ? launch->random.next() % count : 0;
    for (size_t i = 0; i < count; ++i) {
        Warp& warp = warps[(first + i) % count];
        live |= warp.live != 0;
        if (!warp.runnable) continue;
        block_of_thread = this;
        run(warp.lanes[lowest(warp.runnable)]);
        block_of_thread = nullptr;
        return !launch->failed;
    }
    if (live && !open_barrier(*this)) report_deadlock(*this);
    return live && !launch->failed;
}

// ---- What kernels call. ----

uint64_t warp_operation(const Request& request) {
    Lane& lane = *block_of_thread->running;
    Warp& warp = *lane.warp;
    if (!(request.mask & lane.bit())) fail(lane, "a lane is not in its own mask");
    lane.request = request;
    warp.in_operation |= lane.bit();
    warp.runnable &= ~lane.bit();
    const uint32_t awaited = request.mask & warp.live;  // finished lanes do not count
    if ((warp.in_operation & awaited) == awaited) complete(warp, awaited, lane);
    else yield(lane);
    return lane.result;
}

int block_barrier(bool predicate, int line) {
    Block& block = *block_of_thread;
    Lane& lane = *block.running;
    if (block.barrier_line != NO_LINE && block.barrier_line != line)
        fail(lane, "lanes of one block wait at different barriers");
    block.barrier_line = line;
    block.barrier_count += predicate;
    lane.warp->at_barrier |= lane.bit();
    lane.warp->runnable &= ~lane.bit();
    yield(lane);
    return block.barrier_result;
}

// One access in 16 yields to another lane of the warp, and one in 16 to another warp, block or kernel.
void preemption_point() {
    Block* block = block_of_thread;
    if (!block || !block->running) return;
    Lane& lane = *block->running;
    Launch& launch = *block->launch;
    if (++launch.accesses > MOST_ACCESSES) fail(lane, "too many memory accesses: an endless loop");
    if (!launch.random.state) return;
    const uint32_t draw = launch.random.next();
    if (draw % 16 == 0) yield(lane);
    else if (draw % 16 == 1) back_to_scheduler(lane);
}

Lane* running_lane() { return block_of_thread ? block_of_thread->running : nullptr; }

void* dynamic_shared() { return block_of_thread->shared.data(); }
dim3 thread_index() { return block_of_thread->running->index; }
dim3 block_index() { return block_of_thread->index; }
dim3 block_size() { return block_of_thread->launch->block; }
dim3 grid_size() { return block_of_thread->launch->grid; }

}  // namespace cusim
