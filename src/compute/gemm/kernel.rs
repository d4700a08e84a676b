//! The kernels of [`Product`]: tiles in vector registers, for each instruction set.

#![allow(unsafe_code)]

use std::ops::Range;

use crate::compute::Real;
use crate::compute::gemm::{LANES, Product, Start};
use crate::compute::vector::{Portable, Vector};
use crate::mem::prefetch::{LINE_BYTES, prefetch_line, prefetch_line_to_l2};

/// Computes an f32 product with the widest vectors of this machine.
///
/// # Panics
/// As [`Product::run`].
pub(crate) fn product_f32(product: &mut Product<'_, f32>) {
    if !product.check() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F, and the shape was checked.
            return unsafe { product_avx512(product) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA, and the shape was checked.
            return unsafe { product_avx2(product) };
        }
    }
    // SAFETY: the shape was checked.
    unsafe { plain(product) }
}

/// Computes a product with plain arithmetic, for any number type.
///
/// # Panics
/// As [`Product::run`].
pub(crate) fn product_portable<T: Real>(product: &mut Product<'_, T>) {
    if product.check() {
        // SAFETY: the shape was checked.
        unsafe { plain(product) }
    }
}

/// # Safety
/// [`Product::check`] returned true.
unsafe fn plain<T: Real>(product: &mut Product<'_, T>) {
    // SAFETY: `Portable` needs no instruction set; the caller guarantees the shape.
    unsafe { by_panels::<T, Portable<T>, 4, 4, 4>(product) }
}

/// # Safety
/// The processor has AVX-512F, and [`Product::check`] returned true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn product_avx512(product: &mut Product<'_, f32>) {
    // SAFETY: this function has the target feature; the caller guarantees the shape.
    unsafe { by_panels::<f32, std::arch::x86_64::__m512, 2, 2, 12>(product) }
}

/// # Safety
/// The processor has AVX2 and FMA, and [`Product::check`] returned true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn product_avx2(product: &mut Product<'_, f32>) {
    // Of 16 registers, 12 hold sums, two hold `B` and one holds `A`. If a tile had the width of a whole panel
    // (four registers), the same 12 sums (3 rows) would need 17 registers.
    // SAFETY: this function has the target features; the caller guarantees the shape.
    unsafe { by_panels::<f32, std::arch::x86_64::__m256, 4, 2, 6>(product) }
}

/// Computes all tiles of `MR` rows and `N` registers, panel after panel, and then the remaining rows. A panel
/// is `FULL` registers wide.
///
/// # Safety
/// [`Product::check`] returned true, and the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn by_panels<T: Real, V: Vector<T>, const FULL: usize, const N: usize, const MR: usize>(
    p: &mut Product<'_, T>,
) {
    debug_assert!(FULL * V::WIDTH == LANES && FULL.is_multiple_of(N));
    let mut edge = [T::default(); LANES];
    let whole = p.rows - p.rows % MR;
    for first in (0..p.columns).step_by(N * V::WIDTH) {
        for row in (0..whole).step_by(MR) {
            // SAFETY: the caller guarantees the instruction set and the shape. The tile fits: `MR` rows from
            // here on exist, and a narrower tile is loaded and stored through `edge`.
            unsafe {
                let mut tile = Tile::at(p, row, first, &mut edge);
                tile.prefetch_after(first + N * V::WIDTH, row..row + MR, whole, p);
                match tile.width.div_ceil(V::WIDTH) {
                    1 if N > 1 => tile.run::<V, 1, MR, 1>(),
                    2 if N > 2 => tile.run::<V, 2, MR, 1>(),
                    _ => tile.run::<V, N, MR, 1>(),
                };
            }
        }
    }
    // SAFETY: as the caller guarantees.
    unsafe { last_rows::<T, V, FULL>(p, whole, &mut edge) };
}

/// Computes the tiles of the rows from `whole` on. `edge` may have any values.
///
/// # Safety
/// As for [`by_panels`].
#[inline(always)]
unsafe fn last_rows<T: Real, V: Vector<T>, const FULL: usize>(
    p: &mut Product<'_, T>,
    whole: usize,
    edge: &mut [T; LANES],
) {
    let mut first = 0;
    while first < p.columns && whole < p.rows {
        // A few rows of a single panel are too few chains to hide the latency of a multiply-add. So several
        // whole panels are computed side by side, as far as registers allow.
        let side_by_side = (p.columns - first) / LANES;
        let mut row = whole;
        let across = match p.rows - whole {
            ..2 if FULL > 2 && side_by_side >= 2 => 2,
            _ if FULL > 2 => 1,
            ..4 if side_by_side >= 4 => 4,
            ..8 if side_by_side >= 2 => 2,
            _ => 1,
        };
        while row < p.rows {
            // SAFETY: as for the tiles of `by_panels`. Each arm computes at most as many rows as are left,
            // and `across` is at most the number of whole panels that are left.
            unsafe {
                let tile = Tile::at(p, row, first, edge);
                row += match (p.rows - row, across) {
                    (2.., 4) => tile.run::<V, FULL, 2, 4>(),
                    (_, 4) => tile.run::<V, FULL, 1, 4>(),
                    (4.., 2) => tile.run::<V, FULL, 4, 2>(),
                    (2.., 2) => tile.run::<V, FULL, 2, 2>(),
                    (_, 2) => tile.run::<V, FULL, 1, 2>(),
                    (8.., _) if FULL <= 2 => tile.run::<V, FULL, 8, 1>(),
                    (4.., _) if FULL <= 2 => tile.run::<V, FULL, 4, 1>(),
                    (2.., _) => tile.run::<V, FULL, 2, 1>(),
                    _ => tile.run::<V, FULL, 1, 1>(),
                };
            }
        }
        first += across * LANES;
    }
}

/// How many steps of the depth ahead panels are prefetched. Distances from 6 to 24 were measured.
const AHEAD: usize = 12;

/// The sums of a tile, by row, panel and register.
type Sums<V, const N: usize, const ROWS: usize, const PANELS: usize> = [[[V; N]; PANELS]; ROWS];

/// One tile of `C`: some rows of one panel, or of several whole panels side by side.
///
/// It is computed as `ROWS` rows of the first `N` registers of type `V` of `PANELS` panels. For this it must
/// *fit*:
///
/// - The processor has the instruction set of `V`, and `N` registers are at most as wide as a panel.
/// - `a` has `ROWS` rows of `depth` steps.
/// - `b` has `depth` lines of [`LANES`] for each panel, panel after panel.
/// - `bias` is null or has `N` registers for each panel, at the distance of panels.
/// - `c` has `ROWS` rows, to which there is no other reference: of `width` elements, or of `PANELS` whole
///   panels if there are several.
struct Tile<'e, T> {
    depth: usize,
    a: *const T,
    row_stride: usize,
    step_stride: usize,
    b: *const T,
    bias: *const T,
    add: bool,
    relu: bool,
    c: *mut T,
    c_stride: usize,
    /// Buffer for a row of the last panel: registers are wider than the columns that are left in `c`.
    edge: &'e mut [T; LANES],
    width: usize,
    /// Lines of a part of the next columns, which are prefetched, and how many steps of the depth they are.
    next: *const T,
    next_steps: usize,
}

// Loops use an index: with iterators the compiler keeps the sums in memory.
#[allow(clippy::needless_range_loop)]
impl<'e, T: Real> Tile<'e, T> {
    /// Prefetches a part of the columns from `first` on while the tile is computed: each tile of `rows`, of
    /// `all` rows, its share of the depth. Weights that do not fit the L2 cache are read once for each chunk
    /// of a batch, and the first tile would wait for each line.
    #[inline(always)]
    fn prefetch_after(&mut self, first: usize, rows: Range<usize>, all: usize, p: &Product<'_, T>) {
        if first < p.columns {
            let [begin, end] = [rows.start, rows.end].map(|row| p.depth * row / all);
            let at = first / LANES * LANES * p.depth + first % LANES + begin * LANES;
            (self.next, self.next_steps) = (p.panels.as_ptr().wrapping_add(at), end - begin);
        }
    }

    /// The tile that begins at this row and column.
    ///
    /// # Safety
    /// [`Product::check`] returned true. The product has this row and column, and the column begins a tile.
    #[inline(always)]
    unsafe fn at(p: &mut Product<'_, T>, row: usize, first: usize, edge: &'e mut [T; LANES]) -> Self {
        // SAFETY: the caller guarantees the offsets. `a` and `b` are computed with wrapping arithmetic,
        // because at depth 0 they may be out of bounds.
        unsafe {
            Self {
                depth: p.depth,
                a: p.left.data.as_ptr().wrapping_add(row.wrapping_mul(p.left.row_stride)),
                row_stride: p.left.row_stride,
                step_stride: p.left.step_stride,
                b: p.panels.as_ptr().wrapping_add(first / LANES * LANES * p.depth + first % LANES),
                bias: match p.start {
                    Start::Bias(bias) => bias.as_ptr().add(first),
                    Start::Zero | Start::Add => std::ptr::null(),
                },
                add: matches!(p.start, Start::Add),
                relu: p.relu,
                c: p.output.data.as_mut_ptr().add(row * p.output.stride + first),
                c_stride: p.output.stride,
                edge,
                width: (p.columns - first).min(LANES - first % LANES),
                next: std::ptr::null(),
                next_steps: 0,
            }
        }
    }

    /// Computes `ROWS` rows of the first `N` registers of `PANELS` panels. Returns `ROWS`.
    ///
    /// # Safety
    /// The tile [fits](Tile).
    #[inline(always)]
    unsafe fn run<V: Vector<T>, const N: usize, const ROWS: usize, const PANELS: usize>(mut self) -> usize {
        // SAFETY: the caller guarantees the instruction set.
        let mut sums: Sums<V, N, ROWS, PANELS> = [[[unsafe { V::splat(T::default()) }; N]; PANELS]; ROWS];
        // SAFETY: the caller guarantees that the tile fits.
        unsafe { self.start(&mut sums) };
        let (mut a, mut b, mut next) = (self.a, self.b, self.next);
        for step in 0..self.depth {
            prefetch_step::<T, V, N, ROWS>(b, next, step < self.next_steps);
            // SAFETY: the caller guarantees that the tile fits. `a` and `b` have moved on by `step` steps.
            unsafe { self.multiply_step(a, b, &mut sums) };
            a = a.wrapping_add(self.step_stride);
            b = b.wrapping_add(LANES);
            next = next.wrapping_add(LANES);
        }
        // SAFETY: the caller guarantees that the tile fits.
        unsafe { self.store(&sums) };
        ROWS
    }

    /// The columns of `c` that the first `N` registers cover.
    #[inline(always)]
    fn columns<V: Vector<T>, const N: usize>(&self) -> usize {
        self.width.min(N * V::WIDTH)
    }

    /// Whether registers have only columns of `c`, so that rows are loaded and stored without `edge`.
    #[inline(always)]
    fn is_whole<V: Vector<T>, const N: usize, const PANELS: usize>(&self) -> bool {
        self.columns::<V, N>() == N * V::WIDTH || PANELS > 1
    }

    /// Adds the initial values, of `bias` or of `c`, to sums that are zero.
    ///
    /// # Safety
    /// The tile [fits](Tile).
    #[inline(always)]
    unsafe fn start<V: Vector<T>, const N: usize, const ROWS: usize, const PANELS: usize>(
        &mut self,
        sums: &mut Sums<V, N, ROWS, PANELS>,
    ) {
        for r in 0..ROWS {
            let mut from = self.bias;
            if self.add {
                // SAFETY: `c` has row `r`. If it has fewer columns than the registers, these are copied to
                // `edge`, which has the length of a panel.
                unsafe {
                    from = self.c.add(r * self.c_stride).cast_const();
                    if !self.is_whole::<V, N, PANELS>() {
                        let columns = self.columns::<V, N>();
                        std::ptr::copy_nonoverlapping(from, self.edge.as_mut_ptr(), columns);
                        from = self.edge.as_ptr();
                    }
                }
            }
            if from.is_null() {
                continue;
            }
            for p in 0..PANELS {
                for i in 0..N {
                    // SAFETY: `from` has `N` registers for each panel: it is `bias`, a row of whole panels of
                    // `c`, or `edge`, which is only used for a single panel.
                    sums[r][p][i] = unsafe { V::load(from.add(p * LANES + i * V::WIDTH)) };
                }
            }
        }
    }

    /// Adds the products of one step of the depth, whose elements begin at `a` and `b`.
    ///
    /// # Safety
    /// The tile [fits](Tile). `a` and `b` are those of the tile, moved on by fewer than `depth` steps.
    #[inline(always)]
    unsafe fn multiply_step<V: Vector<T>, const N: usize, const ROWS: usize, const PANELS: usize>(
        &self,
        a: *const T,
        b: *const T,
        sums: &mut Sums<V, N, ROWS, PANELS>,
    ) {
        // SAFETY: the caller guarantees the instruction set.
        let mut lanes = [[unsafe { V::splat(T::default()) }; N]; PANELS];
        for p in 0..PANELS {
            for i in 0..N {
                // SAFETY: each panel of `b` has a line of `LANES` elements for the step, at least `N`
                // registers, and the panels lie `depth` lines apart.
                lanes[p][i] = unsafe { V::load(b.add(p * self.depth * LANES + i * V::WIDTH)) };
            }
        }
        for r in 0..ROWS {
            // SAFETY: `a` has row `r` at this step, and the caller guarantees the instruction set.
            let x = unsafe { V::splat(*a.wrapping_add(r * self.row_stride)) };
            for p in 0..PANELS {
                for i in 0..N {
                    // SAFETY: the caller guarantees the instruction set.
                    sums[r][p][i] = unsafe { x.multiply_add(lanes[p][i], sums[r][p][i]) };
                }
            }
        }
    }

    /// Writes the sums to `c`, after the ReLU if there is one.
    ///
    /// # Safety
    /// The tile [fits](Tile).
    #[inline(always)]
    unsafe fn store<V: Vector<T>, const N: usize, const ROWS: usize, const PANELS: usize>(
        &mut self,
        sums: &Sums<V, N, ROWS, PANELS>,
    ) {
        let (columns, whole) = (self.columns::<V, N>(), self.is_whole::<V, N, PANELS>());
        for r in 0..ROWS {
            // SAFETY: `c` has row `r`.
            let to = unsafe { self.c.add(r * self.c_stride) };
            let out = if whole { to } else { self.edge.as_mut_ptr() };
            for p in 0..PANELS {
                for i in 0..N {
                    // SAFETY: the caller guarantees the instruction set. `out` has `N` registers for each
                    // panel: it is a row of `c`, or `edge`, which is only used for a single panel.
                    unsafe {
                        let sum = if self.relu { sums[r][p][i].relu() } else { sums[r][p][i] };
                        sum.store(out.add(p * LANES + i * V::WIDTH));
                    }
                }
            }
            if !whole {
                // SAFETY: the row of `c` has these columns, and `edge`, which is other memory, has at least
                // as many.
                unsafe { std::ptr::copy_nonoverlapping(self.edge.as_ptr(), to, columns) };
            }
        }
    }
}

/// Prefetches the part that `N` registers need of the line of `b` some steps ahead, and of the line at `next`
/// if there is one. In the last steps, the addresses may lie behind the panels. This is allowed, because a
/// prefetch does not fault at any address, and wrapping arithmetic may leave the allocation.
#[inline(always)]
fn prefetch_step<T: Real, V: Vector<T>, const N: usize, const ROWS: usize>(
    b: *const T,
    next: *const T,
    has_next: bool,
) {
    if has_next {
        for line in 0..(N * V::WIDTH * size_of::<T>()).div_ceil(LINE_BYTES) {
            prefetch_line_to_l2(next.wrapping_add(line * LINE_BYTES / size_of::<T>()));
        }
    }
    if ROWS >= 8 {
        for line in 0..N {
            prefetch_line(b.wrapping_add(AHEAD * LANES + line * V::WIDTH));
        }
    }
}
