//! The arguments of the trainer's kernels, field for field as in `kernels/scratch.cu` and
//! `kernels/update.cu`. For the cache's kernels see [`crate::cache::gpu::args`].

use bytemuck::{Pod, Zeroable};

use crate::compute::pool::WARP_LANES;
use crate::trainer::optim::Moments;
use crate::trainer::pipeline::gpu::Rule;

/// `RecordRun` of scratch.cu: records of one table that move between slots and a staging buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct RecordRun {
    /// Word of the scratchpad at which slot 0 of the records' size begins.
    pub slots_at: u64,
    /// Word of the staging buffer at which the records begin.
    pub staged_at: u64,
    /// Index of the records' first slot in `RecordArgs::list`.
    pub list_at: u32,
    pub rows: u32,
    /// Words of a record.
    pub words: u32,
    /// Always 0.
    pub unused: u32,
}

/// `RecordArgs` of scratch.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[allow(missing_docs)] // documented in scratch.cu
pub(crate) struct RecordArgs {
    pub runs: u64,
    pub scan: u64,
    pub list: u64,
    pub scratch: u64,
    pub staged: u64,
    pub run_count: u32,
    pub unused: u32,
}

/// `UpdateTable` of update.cu: the rows of one table that a batch updates.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct UpdateTable {
    /// Word of the scratchpad at which slot 0 of the table's size begins.
    pub slots_at: u64,
    /// Index of the first row among all rows of the update.
    pub rows_at: u32,
    pub rows: u32,
    pub dim: u32,
    /// Words of a record.
    pub words: u32,
    /// Threads per row: [`lanes_of`] `dim`.
    pub lanes: u32,
    /// Always 0.
    pub unused: u32,
}

/// `UpdateArgs` of update.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[allow(missing_docs)] // documented in update.cu
pub(crate) struct UpdateArgs {
    pub tables: u64,
    pub scan: u64,
    pub list: u64,
    pub starts: u64,
    pub sources: u64,
    pub grads: u64,
    pub scratch: u64,
    pub table_count: u32,
    pub stride: u32,
    pub first_column: u32,
    pub optimizer: u32,
    pub lr: f32,
    pub eps: f32,
    pub size: f32,
    pub first_share: f32,
    pub second_share: f32,
    pub unused: u32,
}

impl UpdateArgs {
    /// Sets the kernel's number for the optimizer, and the optimizer's factors.
    #[must_use]
    pub(crate) fn with_rule(self, rule: Rule) -> Self {
        match rule {
            Rule::Sgd { lr } => Self { optimizer: 0, lr, ..self },
            Rule::Adagrad { lr, eps } => Self { optimizer: 1, lr, eps, ..self },
            Rule::RowwiseAdagrad { lr, eps } => Self { optimizer: 2, lr, eps, ..self },
            Rule::Adam { size, eps, shares: Moments { first, second } } => {
                Self { optimizer: 3, size, eps, first_share: first, second_share: second, ..self }
            }
        }
    }
}

/// Threads for a row of this dim.
#[must_use]
pub(crate) fn lanes_of(dim: u32) -> u32 {
    dim.clamp(1, WARP_LANES).next_power_of_two()
}

#[cfg(test)]
mod tests;
