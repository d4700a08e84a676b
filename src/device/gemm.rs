//! Matrix products whose every element is the same to the bit whatever the batch.
//!
//! `C = A B`, where `B` was packed into panels of [`LANES`] columns. One element of `C` is one
//! chain of multiply-adds over the depth, from the first to the last, in one accumulator: it
//! depends on its row of `A`, its column of `B` and nothing else, so neither the number of rows
//! nor the number of threads nor the height of a tile can change a bit of it (DESIGN.md, promise
//! 2). Libraries choose their kernels by the shape and give no such promise.
//!
//! A tile of `MR` rows and one panel is held in registers. With AVX-512 that is 12 rows of two
//! registers: 24 chains hide the latency of the two multiply-add ports, and each step of the depth
//! costs two loads of `B` and twelve broadcasts of `A`. `A` is never packed: it is read by
//! broadcast, where strides cost nothing as long as rows do not share a cache set, which
//! [`row_stride`] sees to. AVX2 computes the same chains, so the bits are equal; without fused
//! multiply-add a product is rounded before it is added, so they are not.

#![allow(unsafe_code)]

use super::Real;

/// Columns of a packed panel.
pub const LANES: usize = 32;

/// Elements of a packed matrix of `depth` rows and `columns` columns.
#[must_use]
pub fn packed_len(depth: usize, columns: usize) -> usize {
    columns.div_ceil(LANES) * LANES * depth
}

/// The stride for a matrix of `columns` columns: whole vectors, and an odd number of them, so that
/// the same column of neighbouring rows falls into different cache sets.
#[must_use]
pub fn row_stride(columns: usize) -> usize {
    (columns.div_ceil(16) | 1) * 16
}

/// What a tile's accumulators start from.
#[derive(Clone, Copy)]
pub enum Start<'a, T> {
    /// Zero.
    Zero,
    /// One value a column, at least as many as `C` has columns, padded to whole panels.
    Bias(&'a [T]),
    /// What `C` holds.
    Add,
}

/// A left operand: element `(row, step)` lies at `row * row_stride + step * step_stride`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// From one row of `C` to the next.
    pub row_stride: usize,
    /// From one step of the depth to the next.
    pub step_stride: usize,
}

/// A result: element `(row, column)` lies at `row * stride + column`.
pub struct Output<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// From one row to the next.
    pub stride: usize,
}

/// `C = start + A B`, and then negatives to zero when `relu`.
pub struct Product<'a, T> {
    /// Rows of `A` and `C`.
    pub rows: usize,
    /// Columns of `A`, rows of `B`.
    pub depth: usize,
    /// Columns of `B` and `C`.
    pub columns: usize,
    /// `A`.
    pub left: Left<'a, T>,
    /// `B` in panels: `ceil(columns / LANES)` of them, each `depth x LANES`.
    pub panels: &'a [T],
    /// What is added to.
    pub start: Start<'a, T>,
    /// Whether negative results become zero.
    pub relu: bool,
    /// `C`.
    pub output: Output<'a, T>,
}

impl<T: Real> Product<'_, T> {
    /// Computes it.
    ///
    /// # Panics
    /// When a slice is too short for the shape: the kernels read without bounds checks.
    pub fn run(&mut self) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let (rows, depth, columns) = (self.rows, self.depth, self.columns);
        if depth > 0 {
            let last = (rows - 1) * self.left.row_stride + (depth - 1) * self.left.step_stride;
            assert!(last < self.left.data.len(), "left operand: too short");
        }
        assert!(self.panels.len() >= packed_len(depth, columns), "panels: too short");
        assert!(columns <= self.output.stride || rows == 1, "output: rows overlap");
        assert!((rows - 1) * self.output.stride + columns <= self.output.data.len(), "output: too short");
        if let Start::Bias(bias) = self.start {
            assert!(bias.len() >= columns.div_ceil(LANES) * LANES, "bias: too short");
        }
        T::product(self);
    }
}

/// Writes `rows x columns` of row-major `matrix` into panels: the right operand of `X matrix`.
/// Lanes past the last column are zero.
///
/// # Panics
/// When a slice is too short for the shape.
pub fn pack<T: Real>(matrix: &[T], stride: usize, rows: usize, columns: usize, panels: &mut [T]) {
    for (p, panel) in panels.chunks_exact_mut((rows * LANES).max(1)).enumerate() {
        let first = p * LANES;
        let width = columns.saturating_sub(first).min(LANES);
        for (row, lanes) in panel.chunks_exact_mut(LANES).enumerate() {
            lanes[..width].copy_from_slice(&matrix[row * stride + first..][..width]);
            lanes[width..].fill(T::default());
        }
    }
}

/// Turns the panels of a `rows x columns` matrix into panel `p` of its transpose: the rows
/// `p * LANES..` of the matrix, as columns.
///
/// # Panics
/// When a slice is too short for the shape.
pub fn pack_transposed_panel<T: Real>(panels: &[T], rows: usize, columns: usize, p: usize, out: &mut [T]) {
    let first = p * LANES;
    let width = rows.saturating_sub(first).min(LANES);
    if width < LANES {
        out.fill(T::default());
    }
    for (q, block) in out.chunks_mut(LANES * LANES).enumerate() {
        // `block` is (up to 32 columns of the matrix) x (32 of its rows).
        let source = &panels[q * rows * LANES + first * LANES..][..width * LANES];
        let height = (columns - q * LANES).min(LANES);
        for (lane, line) in source.chunks_exact(LANES).enumerate() {
            for (column, value) in line[..height].iter().enumerate() {
                block[column * LANES + lane] = *value;
            }
        }
    }
}

/// A vector register of `T`.
///
/// # Safety
/// `WIDTH` elements are read and written through the pointers given; the implementing type's
/// instruction set must be there.
unsafe trait Vector<T>: Copy {
    const WIDTH: usize;
    unsafe fn load(from: *const T) -> Self;
    unsafe fn store(self, to: *mut T);
    unsafe fn splat(x: T) -> Self;
    unsafe fn multiply_add(self, by: Self, plus: Self) -> Self;
    unsafe fn relu(self) -> Self;
}

/// Any number type, on any machine: a product is rounded before it is added.
#[derive(Clone, Copy)]
struct Portable<T>([T; 8]);

// SAFETY: reads and writes 8 elements, WIDTH says 8, and no instruction set is assumed.
unsafe impl<T: Real> Vector<T> for Portable<T> {
    const WIDTH: usize = 8;
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller vouches for WIDTH elements; arrays of T have T's alignment.
        Self(unsafe { from.cast::<[T; 8]>().read() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: as for load.
        unsafe { to.cast::<[T; 8]>().write(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn multiply_add(self, by: Self, mut plus: Self) -> Self {
        for i in 0..8 {
            plus.0[i] += self.0[i] * by.0[i];
        }
        plus
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        Self(self.0.map(|x| x.at_least(T::default())))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Vector;

    // SAFETY: the intrinsics read and write WIDTH unaligned elements; the callers are functions with
    // the target feature, entered only where the processor reports it.
    unsafe impl Vector<f32> for __m512 {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm512_fmadd_ps(self, by, plus) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // The second operand comes back for a NaN: `x > 0 ? x : 0`, as `at_least` has it.
            // SAFETY: see the impl.
            unsafe { _mm512_max_ps(self, _mm512_setzero_ps()) }
        }
    }

    // SAFETY: as for the wider one.
    unsafe impl Vector<f32> for __m256 {
        const WIDTH: usize = 8;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see the impl.
            unsafe { _mm256_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn multiply_add(self, by: Self, plus: Self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_fmadd_ps(self, by, plus) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the impl.
            unsafe { _mm256_max_ps(self, _mm256_setzero_ps()) }
        }
    }
}

/// Runs an f32 product on the widest vectors of this machine.
pub(super) fn product_f32(product: &mut Product<'_, f32>) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512F.
            return unsafe { product_avx512(product) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has AVX2 and FMA.
            return unsafe { product_avx2(product) };
        }
    }
    product_portable(product);
}

/// Runs a product with plain arithmetic.
pub(super) fn product_portable<T: Real>(product: &mut Product<'_, T>) {
    // SAFETY: `Portable` needs no instruction set, and `Product::run` checked the shape.
    unsafe { by_panels::<T, Portable<T>, 4, 4>(product) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn product_avx512(product: &mut Product<'_, f32>) {
    // SAFETY: this function has the target feature, and `Product::run` checked the shape.
    unsafe { by_panels::<f32, std::arch::x86_64::__m512, 2, 12>(product) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn product_avx2(product: &mut Product<'_, f32>) {
    // Four registers a row: 3 rows fill 12 of 16.
    // SAFETY: as above.
    unsafe { by_panels::<f32, std::arch::x86_64::__m256, 4, 3>(product) }
}

/// Every panel, and in it every tile of up to `MR` rows.
#[inline(always)]
unsafe fn by_panels<T: Real, V: Vector<T>, const N: usize, const MR: usize>(p: &mut Product<'_, T>) {
    debug_assert_eq!(N * V::WIDTH, LANES);
    let output = p.output.data.as_mut_ptr();
    for first in (0..p.columns).step_by(LANES) {
        let width = (p.columns - first).min(LANES);
        let mut row = 0;
        while row < p.rows {
            // SAFETY: `run` checked that every row, step and column lies inside its slice.
            unsafe {
                let tile = Tile {
                    depth: p.depth,
                    a: p.left.data.as_ptr().add(row * p.left.row_stride),
                    row_stride: p.left.row_stride,
                    step_stride: p.left.step_stride,
                    b: p.panels.as_ptr().add(first * p.depth),
                    bias: if let Start::Bias(bias) = p.start {
                        bias.as_ptr().add(first)
                    } else {
                        std::ptr::null()
                    },
                    add: matches!(p.start, Start::Add),
                    relu: p.relu,
                    c: output.add(row * p.output.stride + first),
                    c_stride: p.output.stride,
                    width,
                };
                row += match p.rows - row {
                    left if left >= MR => tile.run::<V, N, MR>(),
                    8.. if MR > 8 => tile.run::<V, N, 8>(),
                    4.. if MR > 4 => tile.run::<V, N, 4>(),
                    2.. => tile.run::<V, N, 2>(),
                    _ => tile.run::<V, N, 1>(),
                };
            }
        }
    }
}

/// One tile of `C`: some rows of one panel.
struct Tile<T> {
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
    width: usize,
}

#[allow(clippy::needless_range_loop)]
impl<T: Real> Tile<T> {
    /// Computes `ROWS` rows and gives back `ROWS`.
    #[inline(always)]
    unsafe fn run<V: Vector<T>, const N: usize, const ROWS: usize>(&self) -> usize {
        // SAFETY: `a` has ROWS rows and `depth` steps, `b` `depth` lines of LANES, `c`
        // ROWS rows of `width` elements; a narrower last panel goes through `edge`, which is whole.
        unsafe {
            // Plain counted loops: iterators here make the compiler keep the sums in memory.
            let mut edge = [T::default(); LANES];
            let mut sums = [[V::splat(T::default()); N]; ROWS];
            for r in 0..ROWS {
                let mut from = self.bias;
                if self.add {
                    from = self.c.add(r * self.c_stride).cast_const();
                    if self.width < LANES {
                        std::ptr::copy_nonoverlapping(from, edge.as_mut_ptr(), self.width);
                        from = edge.as_ptr();
                    }
                }
                if !from.is_null() {
                    for i in 0..N {
                        sums[r][i] = V::load(from.add(i * V::WIDTH));
                    }
                }
            }
            let (mut a, mut b) = (self.a, self.b);
            for _ in 0..self.depth {
                let mut lanes = [V::splat(T::default()); N];
                for i in 0..N {
                    lanes[i] = V::load(b.add(i * V::WIDTH));
                }
                for r in 0..ROWS {
                    let x = V::splat(*a.wrapping_add(r * self.row_stride));
                    for i in 0..N {
                        sums[r][i] = x.multiply_add(lanes[i], sums[r][i]);
                    }
                }
                a = a.wrapping_add(self.step_stride);
                b = b.wrapping_add(LANES);
            }
            for r in 0..ROWS {
                let to = self.c.add(r * self.c_stride);
                let out = if self.width < LANES { edge.as_mut_ptr() } else { to };
                for i in 0..N {
                    let sum = if self.relu { sums[r][i].relu() } else { sums[r][i] };
                    sum.store(out.add(i * V::WIDTH));
                }
                if self.width < LANES {
                    std::ptr::copy_nonoverlapping(edge.as_ptr(), to, self.width);
                }
            }
            ROWS
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    struct Case {
        depth: usize,
        columns: usize,
        a: Vec<f32>,
        panels: Vec<f32>,
        bias: Vec<f32>,
    }

    fn case(rows: usize, depth: usize, columns: usize, seed: u32) -> Case {
        let mut panels = vec![0.0; packed_len(depth, columns)];
        pack(&numbers(depth * columns, seed ^ 7), columns, depth, columns, &mut panels);
        let bias = numbers(columns.div_ceil(LANES) * LANES, seed ^ 9);
        Case { depth, columns, a: numbers(rows * depth, seed), panels, bias }
    }

    fn product<'a>(c: &'a Case, first: usize, rows: usize, out: &'a mut [f32]) -> Product<'a, f32> {
        Product {
            rows,
            depth: c.depth,
            columns: c.columns,
            left: Left { data: &c.a[first * c.depth..], row_stride: c.depth, step_stride: 1 },
            panels: &c.panels,
            start: Start::Bias(&c.bias),
            relu: false,
            output: Output { data: out, stride: c.columns },
        }
    }

    proptest! {
        #[test]
        fn a_row_is_the_same_to_the_bit_in_any_number_of_rows(
            rows in 1usize..40, depth in 0usize..70, columns in 1usize..80, seed: u32
        ) {
            let c = case(rows, depth, columns, seed);
            let mut whole = vec![0.0; rows * columns];
            product(&c, 0, rows, &mut whole).run();
            for row in 0..rows {
                let mut alone = vec![0.0; columns];
                product(&c, row, 1, &mut alone).run();
                prop_assert_eq!(&alone, &whole[row * columns..][..columns]);
            }
        }

        #[test]
        fn vectors_agree_with_one_chain_of_fused_multiply_adds(
            rows in 1usize..30, depth in 0usize..50, columns in 1usize..70, seed: u32, relu: bool, add: bool
        ) {
            let c = case(rows, depth, columns, seed);
            let before = numbers(rows * columns, seed ^ 3);
            let run = |kernel: fn(&mut Product<'_, f32>)| {
                let mut out = before.clone();
                let mut p = product(&c, 0, rows, &mut out);
                p.relu = relu;
                if add { p.start = Start::Add; }
                kernel(&mut p);
                out
            };
            let chain = |fused: bool| {
                let mut out = before.clone();
                for (i, value) in out.iter_mut().enumerate() {
                    let (row, column) = (i / columns, i % columns);
                    let mut sum = if add { *value } else { c.bias[column] };
                    for k in 0..depth {
                        let b = c.panels[(column / LANES * depth + k) * LANES + column % LANES];
                        let a = c.a[row * depth + k];
                        sum = if fused { a.mul_add(b, sum) } else { sum + a * b };
                    }
                    *value = if relu { sum.at_least(0.0) } else { sum };
                }
                out
            };
            prop_assert_eq!(run(product_portable), chain(false));
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: just detected; `product` made the shape consistent.
                    prop_assert_eq!(run(|p| unsafe { product_avx512(p) }), chain(true));
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: as above.
                    prop_assert_eq!(run(|p| unsafe { product_avx2(p) }), chain(true));
                }
            }
        }

        #[test]
        fn packing_the_transpose_equals_transposing_then_packing(rows in 1usize..70, columns in 1usize..70) {
            let matrix = numbers(rows * columns, 5);
            let turned: Vec<f32> =
                (0..rows * columns).map(|i| matrix[i % rows * columns + i / rows]).collect();
            let mut panels = vec![0.0; packed_len(rows, columns)];
            pack(&matrix, columns, rows, columns, &mut panels);
            let mut expected = vec![0.0; packed_len(columns, rows)];
            pack(&turned, rows, columns, rows, &mut expected);
            let mut got = vec![1.0; packed_len(columns, rows)];
            for (p, out) in got.chunks_exact_mut(columns * LANES).enumerate() {
                pack_transposed_panel(&panels, rows, columns, p, out);
            }
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    #[should_panic(expected = "left operand")]
    fn a_short_operand_is_refused_before_it_is_read() {
        let mut c = case(4, 8, 8, 1);
        c.a.truncate(20);
        product(&c, 0, 4, &mut [0.0; 32]).run();
    }
}
