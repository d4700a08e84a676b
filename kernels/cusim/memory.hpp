// Weak memory order: which value a load returns.
//
// On a GPU a write reaches other threads late and out of order, unless fences order it. Here every write
// takes effect at once, but a load may return an older value. The model is the view machine of Kang et al.,
// "A Promising Semantics for Relaxed-Memory Concurrency" (POPL 2017), without its promises:
//
// - every write has a time, and each address keeps its last versions;
// - a thread has a view: all writes up to one time, and single later writes that it has read or made itself.
//   A load returns any version of its address that is not older than the version in the view;
// - a fence releases: later writes of the thread carry the fence's time. It also acquires: the view is raised
//   to the times carried by the versions that the thread has read. A fence therefore works only in pairs;
// - an atomic operation always reads the last version, and its write also carries the time of that version;
// - __syncthreads and __syncwarp join the views of their threads, and are no fences for other blocks. Ballots
//   and shuffles order nothing;
// - a launch begins with a view of everything written so far.
//
// PTX allows every behaviour of the model. It allows more than the model: here a fence covers all earlier
// writes, not only those that its thread has seen; old versions are forgotten; and a load is never delayed
// until after a later store. Plain loads and stores are not part of the model: they use the last version.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace cusim {

struct Random {
    uint64_t state = 0;  // 0: no preemption, and no weak order
    uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<uint32_t>(state >> 32);
    }
};

// What a thread, or a group of threads, is certain to see.
struct View {
    uint64_t time = 0;                                // every write up to this time
    std::unordered_map<const void*, uint64_t> newer;  // by address: the time of a later write

    uint64_t of(const void* address) const {
        if (newer.empty()) return time;
        const auto found = newer.find(address);
        return found == newer.end() ? time : std::max(time, found->second);
    }
    void see(const void* address, uint64_t when) {
        if (when <= time) return;
        uint64_t& seen = newer[address];
        seen = std::max(seen, when);
    }
    void raise(uint64_t to) {
        if (to <= time) return;
        time = to;
        std::erase_if(newer, [to](const auto& write) { return write.second <= to; });
    }
    void absorb(View& other) {
        raise(other.time);
        for (const auto& [address, when] : other.newer) see(address, when);
        other.newer.clear();
    }
};

struct Version {
    uint64_t value = 0;
    uint64_t time = 0;      // of the write
    uint64_t released = 0;  // of the fence that the write carries
};

// The last versions of each address. An address without an entry has only the version in memory.
class Memory {
  public:
    uint64_t now() const { return now_; }

    // A random version that is not older than time `seen`. `current` is the value in memory.
    Version load(const void* address, uint64_t current, uint64_t seen, Random& random) {
        const History& history = find(address, current);
        if (history.address != address) return {current, 0, history.forgotten};
        const Version* last = history.versions + history.count - 1;
        const Version* oldest = last;
        while (oldest > history.versions && oldest->time > seen) --oldest;
        if (oldest == last || random.next() % STALE != 0) return *last;
        return oldest[random.next() % static_cast<uint32_t>(last - oldest)];
    }

    Version latest(const void* address, uint64_t current) {
        const History& history = find(address, current);
        if (history.address != address) return {current, 0, history.forgotten};
        return history.versions[history.count - 1];
    }

    // Returns the time of the write.
    uint64_t store(const void* address, uint64_t before, uint64_t value, uint64_t released) {
        History& history = find(address, before);
        if (history.address != address) {
            history.forget();
            history.address = address;
            history.versions[history.count++] = {before, 0, history.forgotten};
        }
        if (history.count == VERSIONS) {
            std::copy(history.versions + 1, history.versions + VERSIONS, history.versions);
            --history.count;
        }
        history.versions[history.count++] = {value, ++now_, released};
        return now_;
    }

  private:
    static constexpr uint32_t STALE = 3;  // one in this many loads returns an older version, if it may
    static constexpr uint32_t VERSIONS = 8;
    static constexpr uint32_t HISTORIES = 1 << 12;

    struct History {
        const void* address = nullptr;
        uint32_t count = 0;
        Version versions[VERSIONS];  // oldest first; the last is in memory
        uint64_t forgotten = 0;      // the latest `released` of all forgotten versions

        void forget() {
            for (; count; --count) forgotten = std::max(forgotten, versions[count - 1].released);
            address = nullptr;
        }
    };

    // The entry of the table for an address. It may hold the history of another address with the same hash.
    // The host, copies and plain stores bypass this model. If they have changed memory, the history is
    // forgotten.
    History& find(const void* address, uint64_t current) {
        const uint64_t hash = (reinterpret_cast<uint64_t>(address) >> 2) * 0x9E3779B97F4A7C15ull;
        History& history = histories_[hash >> 52];
        const bool here = history.address == address;
        if (here && history.versions[history.count - 1].value != current) history.forget();
        return history;
    }

    uint64_t now_ = 0;
    std::vector<History> histories_ = std::vector<History>(HISTORIES);
};

// The memory of the simulated device, one per OS thread.
Memory& memory();

}  // namespace cusim
