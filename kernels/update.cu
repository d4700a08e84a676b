// The backward pass of the embedding layer and the optimizer in one launch: the casted gather-reduce of
// Tensor Casting (section IV), fused with the update of the row that the gradient is for.
//
// The host has sorted a batch's occurrences by row (src/trainer/casting/mod.rs). The sources of a row's
// gradient are contiguous and in batch order, so the gradient is a gather and a sum. That needs neither
// atomics nor a copy of the gradient per occurrence, and the order of addition is fixed. Under mean pooling
// each part is divided by the bag's size before it is added.
//
// One launch serves all tables, by self-identified fusion (FLECHE section 3.2). Each table is a segment of
// threads, rounded up to whole warps. In it a row has `lanes` threads: a power of two close to its dim, and
// at most a warp. So rows of dim 1 fill warps as well as rows of dim 128 do, and the lanes of a row are in
// one warp.
//
// **Bits.** Every element goes through the operations of src/trainer/update.rs and src/trainer/optim.rs in
// their order, each rounded: kernels are compiled without contraction, and with correctly rounded division
// and square root. Row-wise Adagrad's mean of squares is a sum in the order of the row's elements, which
// lanes exchange by shuffles.
//
// The structs below equal `UpdateTable` and `UpdateArgs` of src/trainer/pipeline/gpu/args.rs and
// `GradientSource` of src/trainer/casting/mod.rs, field by field. The host checks every slot, sample and
// column.
#include "common.cuh"

struct UpdateTable {
    u64 slots_at;  // word of the scratchpad where slot 0 of this record size begins
    u32 rows_at;   // index of its first row in `list` and `starts`
    u32 rows;
    u32 dim;       // elements of a row: the first words of its record, before the optimizer's state
    u32 words;     // per record
    u32 lanes;     // per row: a power of two, at most WARP
    u32 unused;
};

// An occurrence of a row: the source of a part of its gradient.
struct Source {
    u32 sample;
    u32 column;     // of the input row: where the lookup's gradient begins
    float divisor;  // the bag's size under mean pooling; else 1
};

struct UpdateArgs {
    const UpdateTable* tables;  // table_count elements
    const u32* scan;            // table_count + 1 elements: prefix sum of the segments' warps
    const u32* list;            // by row: its slot
    const u32* starts;          // by row: index of its first source; at the end: the number of sources
    const Source* sources;
    const float* grads;         // samples x stride: the gradients of the pooled part of the input rows
    float* scratch;
    u32 table_count;
    u32 stride;
    u32 first_column;           // of the pooled part in the input row
    u32 optimizer;
    float lr;
    float eps;
    float size;                 // Adam: lr with both bias corrections
    float first_share;          // Adam: 1 - beta1
    float second_share;         // Adam: 1 - beta2
    u32 unused;
};

constexpr u32 SGD = 0, ADAGRAD = 1, ROWWISE_ADAGRAD = 2;  // else Adam

// The row of a lane.
struct Row {
    float* record;
    u32 begin, end;  // its sources in `sources`
    u32 lane;        // number of the lane among those of the row
    bool live;       // false after the table's last row
};

// One element of a row's gradient. The sum starts with the first source and not with +0, as on the host.
__device__ __forceinline__ float gradient(const UpdateArgs& args, const Row& row, u32 element) {
    float sum = 0.0f;
    for (u32 i = row.begin; i < row.end; ++i) {
        const Source source = args.sources[i];
        const u64 at = static_cast<u64>(source.sample) * args.stride + (source.column - args.first_column);
        const float part = args.grads[at + element] / source.divisor;
        sum = i == row.begin ? part : sum + part;
    }
    return sum;
}

// Adds the mean of the squares of a row's gradient to the row's state. Returns the learning rate of its
// elements. Called by the whole warp. The update computes the gradient again: it may be too long for
// registers, and its sources are now in the GPU's caches.
__device__ __forceinline__ float rowwise_rate(const UpdateArgs& args, const UpdateTable& table,
                                              const Row& row) {
    float squares = 0.0f;
    for (u32 first = 0; first < table.dim; first += table.lanes) {
        const u32 element = first + row.lane;
        const float g = row.live && element < table.dim ? gradient(args, row, element) : 0.0f;
        const float square = g * g;
        for (u32 lane = 0; lane < table.lanes && first + lane < table.dim; ++lane)
            squares += __shfl_sync(ALL_LANES, square, lane, table.lanes);
    }
    float sum = 0.0f;
    if (row.live && row.lane == 0) {
        float* state = row.record + table.dim;
        sum = *state + squares / static_cast<float>(table.dim);
        *state = sum;
    }
    return args.lr / (sqrtf(__shfl_sync(ALL_LANES, sum, 0, table.lanes)) + args.eps);
}

// Updates one element.
__device__ __forceinline__ void step(const UpdateArgs& args, u32 dim, float rate, float g, float* weight) {
    float* first = weight + dim;
    float* second = first + dim;
    if (args.optimizer == SGD) {
        *weight -= args.lr * g;
    } else if (args.optimizer == ADAGRAD) {
        const float sum = *first + g * g;
        *first = sum;
        *weight -= args.lr * g / (sqrtf(sum) + args.eps);
    } else if (args.optimizer == ROWWISE_ADAGRAD) {
        *weight -= rate * g;
    } else {
        const float m = *first + (g - *first) * args.first_share;
        const float v = *second + (g * g - *second) * args.second_share;
        *first = m;
        *second = v;
        *weight -= args.size * m / (sqrtf(v) + args.eps);
    }
}

extern "C" __global__ void update_rows(UpdateArgs args) {
    u32* scan = dynamic_shared<u32>();
    for (u32 i = threadIdx.x; i < args.table_count + 1; i += blockDim.x) scan[i] = args.scan[i];
    __syncthreads();

    const u32 warps_a_block = blockDim.x / WARP, warps = scan[args.table_count];
    const u32 first = blockIdx.x * warps_a_block + threadIdx.x / WARP;
    for (u32 warp = first; warp < warps; warp += gridDim.x * warps_a_block) {
        const u32 segment = segment_of(scan, args.table_count, warp);
        const UpdateTable table = args.tables[segment];
        const u32 item = (warp - scan[segment]) * WARP + threadIdx.x % WARP;
        const u32 k = item / table.lanes;
        Row row = {nullptr, 0, 0, item % table.lanes, k < table.rows};
        if (row.live) {
            const u64 slot = args.list[table.rows_at + k];
            row.record = args.scratch + table.slots_at + slot * table.words;
            row.begin = args.starts[table.rows_at + k];
            row.end = args.starts[table.rows_at + k + 1];
        }
        const float rate = args.optimizer == ROWWISE_ADAGRAD ? rowwise_rate(args, table, row) : 0.0f;
        for (u32 element = row.lane; row.live && element < table.dim; element += table.lanes)
            step(args, table.dim, rate, gradient(args, row, element), row.record + element);
    }
}
