// What every kernel shares: integer names, and the identification step of a fused launch.
//
// The files of this folder are compiled three ways from one text: by nvcc, by NVRTC at run time, and,
// for tests on a machine with no GPU, as C++ by cusim (the folder beside this file). So they include no
// header but this one, and use no inline PTX, cooperative groups or textures.
#pragma once

#ifdef CUSIM
#include "cusim/cusim.hpp"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP = 32;

// The launch's dynamic shared memory.
template <class T> __device__ __forceinline__ T* dynamic_shared() {
#ifdef CUSIM
    return static_cast<T*>(cusim::dynamic_shared());
#else
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
#endif
}

// Which segment of a fused launch a warp works for: the last `i` below `segments` with
// `scan[i] <= warp`, where `scan` is the exclusive prefix sum of the segments' warps (FLECHE, section
// 3.2). Empty segments are stepped over. The whole warp takes the same branches, since a segment's
// threads are rounded up to whole warps.
__device__ __forceinline__ u32 segment_of(const u32* scan, u32 segments, u32 warp) {
    u32 low = 0, high = segments;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (scan[middle] <= warp) low = middle;
        else high = middle;
    }
    return low;
}
