// The backward pass of the embedding layer and the optimizer, in one launch: the casted gather-reduce of
// Tensor Casting (section IV), fused with the update of the row that it is for.
//
// The host has sorted a batch's occurrences by row (src/trainer/casting.rs), so a row's gradient is the sum
// of those of its sources, which stand side by side in batch order: a gather. No atomics, no expanded
// gradients, and one order of addition: the first source's gradient, and then the others one by one, each
// divided first where its bag is a mean.
//
// One launch serves all tables, by FLECHE's self-identified fusion (section 3.2): a table is a segment in
// which a row has `lanes` threads, a power of two as near to its dim as a warp allows, rounded up to whole
// warps. So rows of dim 1 fill warps as those of dim 128 do, and the lanes of a row lie in one warp.
//
// **Bits.** Every element goes through the operations of src/trainer/update.rs and src/trainer/optim.rs in
// their order, each rounded by itself: the kernels are compiled with no contraction, and with division and
// square root correctly rounded. Row-wise Adagrad's mean of squares is a sum over the row in the order of its
// elements, which lanes hand round by shuffles.
//
// The structs below are `UpdateTable` and `UpdateArgs` of src/device/cuda/train_args.rs and `Source` of
// src/device/scratch.rs, field for field. The host has checked every slot, sample and column.
#include "common.cuh"

struct UpdateTable {
    u64 slots_at;  // the word of the scratchpad at which slot 0 of its records' size begins
    u32 rows_at;   // its first row's place in `list` and `starts`
    u32 rows;
    u32 dim;       // elements of a row, the first words of its record; its states are behind them
    u32 words;     // of a record
    u32 lanes;     // of a row: a power of two, at most WARP
    u32 unused;
};

// Where a part of a row's gradient comes from.
struct Source {
    u32 sample;
    u32 column;     // of the input row
    float divisor;  // the bag's size under mean pooling, else 1
};

struct UpdateArgs {
    const UpdateTable* tables;  // table_count
    const u32* scan;            // table_count + 1, in warps
    const u32* list;            // by row: its slot
    const u32* starts;          // by row where its sources begin, and a last entry where they end
    const Source* sources;
    const float* grads;         // samples x stride: the gradients of the pooled part of the input rows
    float* scratch;
    u32 table_count;
    u32 stride;
    u32 first_column;           // columns of the input row before the pooled part
    u32 optimizer;
    float lr;
    float eps;
    float size;                 // Adam: lr with both bias corrections
    float first_share;          // Adam: what of the difference each moment takes on
    float second_share;
    u32 unused;
};

constexpr u32 SGD = 0, ADAGRAD = 1, ROWWISE_ADAGRAD = 2;  // else Adam

// One row and its lane's place in it. A lane past the table's end has a row that is not live.
struct Row {
    float* record;
    u32 begin, end;  // of its sources
    u32 lane;        // among the row's
    bool live;
};

// One element of a row's gradient. It starts as the first source's, not at +0, as the host's does.
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

// Adds the mean of the squares of a row's gradient to its one state, and gives what its elements are
// multiplied by. The whole warp calls it. The gradient is summed again afterwards, rather than kept: a row
// may be of any length, and what was read once is near.
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

// One element's step.
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
