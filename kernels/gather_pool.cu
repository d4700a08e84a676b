// The last step of the embedding layer in one launch: pools an embedding bag for every lookup of every
// sample, from deduplicated rows, and copies the dense inputs to the front of each output row.
//
// One launch serves any number of lookups with different dims, by self-identified fusion (FLECHE section
// 3.2): lookup i is a segment of `samples * dim` threads rounded up to whole warps, and the dense inputs are
// one more segment at the end. `scan` is the prefix sum of the segments' warps; a warp finds its segment by
// binary search in shared memory, and a thread computes one element of one sample.
//
// A thread adds its element of the sample's rows in id order, whatever the launch's shape. So the sum is the
// same to the bit for every grid, and equal to the host's.
//
// An occurrence's place says where its row is: in the pool, in host memory, in the batch's copy buffer, among
// the rows that the host has fetched for the misses, or at its owner's place. The probe writes the places; in
// training the host does. The kernel is launched right after the probe, before the host knows whether there
// are misses. It does nothing unless the number of staged rows equals the number of misses. So a batch
// without misses needs a copy, two launches and one wait.
//
// The two structs below equal `KernelLookup` of src/compute/pool.rs and `PoolArgs` of
// src/device/cuda/pool_args.rs, field by field. The host checks every offset, index and width before the
// launch.
#include "common.cuh"

struct KernelLookup {
    u32 offsets_at;      // the bag of sample s is [offsets[offsets_at + s], offsets[offsets_at + s + 1])
    u32 occurrences_at;  // index of its first occurrence, added to a bag's bounds
    u32 dim;             // elements of a row
    u32 column;          // of an output row: where the pooled vector begins
    u32 pooling;         // 0 sum, 1 mean
    u32 element;         // type of the elements: 0 f32, 1 f16, 2 int8
};

struct PoolArgs {
    const BatchHeader* header;
    const BatchState* state;
    const KernelLookup* lookups;  // lookup_count elements
    const u32* scan;            // lookup_count + 2 elements: prefix sum of the segments' warps
    const u32* offsets;
    const u64* places;          // by occurrence
    const u32* owners;          // by occurrence
    const u32* const* rows;     // by miss: the row's address; null is read as zeros
    const u32* pool;
    const u32* host;            // base address of locations in host memory
    const u32* copies;
    const float* dense;         // samples x dense_width
    float* out;                 // samples x stride
    u32 lookup_count;
    u32 dense_width;
    u32 stride;
    u32 staged;                 // missed rows that the host has staged
};

constexpr u32 POOLING_MEAN = 1;
constexpr u32 ELEMENT_F16 = 1, ELEMENT_INT8 = 2;

// The exact value of an IEEE binary16, computed as on the host (src/types/element.rs).
__device__ __forceinline__ float value_of_f16(u32 bits) {
    const u32 magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const u32 exponent = magnitude & 0x0f800000, rebias = (127 - 15) << 23;
    // A subnormal is a multiple of 2^-24, which f32 represents exactly.
    if (exponent == 0) {
        const float steps = static_cast<float>(bits & 0x3ff) * (1.0f / (1 << 24));
        return sign ? -steps : steps;
    }
    const u32 quiet = magnitude & 0x007fffff ? 1u << 22 : 0;
    const u32 value = exponent == 0x0f800000 ? (magnitude + 2 * rebias) | quiet : magnitude + rebias;
    return __uint_as_float(value | sign);
}

// One element of a row. The only place that distinguishes element types. A row is padded to whole words.
__device__ __forceinline__ float element_of(const u32* row, u32 type, u32 dim, u32 element) {
    if (type == ELEMENT_F16) return value_of_f16(reinterpret_cast<const unsigned short*>(row)[element]);
    if (type == ELEMENT_INT8) {
        const float* tail = reinterpret_cast<const float*>(row + (dim + 3) / 4);
        const float step = reinterpret_cast<const unsigned char*>(row)[element];
        // Rounded twice, never fused, as on the host.
        return __fadd_rn(__fmul_rn(step, tail[0]), tail[1]);
    }
    return reinterpret_cast<const float*>(row)[element];
}

// The address of an occurrence's row; null for an absent row, which adds nothing.
__device__ __forceinline__ const u32* row_at(const PoolArgs& args, u32 occurrence) {
    u64 place = args.places[occurrence];
    if (kind_of(place) == AT_OWNER) place = args.places[args.owners[occurrence]];
    const u64 value = place & PLACE_VALUE, kind = kind_of(place);
    if (kind == AT_LOCATION) return row_of(value, args.pool, args.host);
    if (kind == AT_MISS) return args.rows[value];
    if (kind == AT_COPY) return args.copies + value;
    return nullptr;
}

// One element of one sample's pooled bag. The sum starts with the first row and not with +0, as on the host,
// so that a bag of one row equals that row to the bit, including -0.
__device__ __forceinline__ float pooled(const PoolArgs& args, const KernelLookup& lookup, u32 sample,
                                        u32 element) {
    const u32* bounds = args.offsets + lookup.offsets_at + sample;
    const u32 begin = bounds[0], end = bounds[1];
    float sum = 0.0f;
    for (u32 i = begin; i < end; ++i) {
        const u32* row = row_at(args, lookup.occurrences_at + i);
        if (!row) continue;
        const float value = element_of(row, lookup.element, lookup.dim, element);
        sum = i == begin ? value : sum + value;
    }
    if (lookup.pooling == POOLING_MEAN && end > begin) sum /= static_cast<float>(end - begin);
    return sum;
}

extern "C" __global__ void gather_pool(PoolArgs args) {
    if (args.state->misses != args.staged) return;
    u32* scan = dynamic_shared<u32>();
    for (u32 i = threadIdx.x; i < args.lookup_count + 2; i += blockDim.x) scan[i] = args.scan[i];
    __syncthreads();

    const u32 warps_a_block = blockDim.x / WARP;
    const u32 lane = threadIdx.x % WARP, samples = args.header->samples;
    const u32 warps = scan[args.lookup_count + 1];
    const u32 first = blockIdx.x * warps_a_block + threadIdx.x / WARP;
    for (u32 warp = first; warp < warps; warp += gridDim.x * warps_a_block) {
        const u32 segment = segment_of(scan, args.lookup_count + 1, warp);
        const u32 item = (warp - scan[segment]) * WARP + lane;
        const bool dense = segment == args.lookup_count;
        const u32 width = dense ? args.dense_width : args.lookups[segment].dim;
        const u32 sample = item / width, element = item % width;
        if (sample >= samples) continue;
        float* row = args.out + static_cast<u64>(sample) * args.stride;
        if (dense) {
            row[element] = args.dense[static_cast<u64>(sample) * width + element];
        } else {
            const KernelLookup& lookup = args.lookups[segment];
            row[lookup.column + element] = pooled(args, lookup, sample, element);
        }
    }
}
