//! Compares products with one chain of multiply-adds per element, on every instruction set of this machine.

#![allow(unsafe_code)]

use proptest::prelude::*;

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::compute::gemm::kernel::{product_avx2, product_avx512};
#[cfg(target_arch = "x86_64")]
use crate::skip::skip_part;

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

/// A matrix without gaps between its rows.
fn whole(data: &[f32], rows: usize, columns: usize) -> Matrix<'_, f32> {
    Matrix { data, stride: columns, rows, columns }
}

fn case(rows: usize, depth: usize, columns: usize, seed: u32) -> Case {
    let mut panels = vec![0.0; packed_len(depth, columns)];
    pack(whole(&numbers(depth * columns, seed ^ 7), depth, columns), &mut panels);
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
    fn packing_the_transpose_equals_packing_an_elementwise_transpose(
        rows in 0usize..80, columns in 0usize..50, gap in 0usize..9, seed: u32
    ) {
        let stride = columns + gap;
        let matrix = numbers(rows * stride, seed);
        let elements = (0..columns).flat_map(|c| (0..rows).map(move |r| (r, c)));
        let transposed: Vec<f32> = elements.map(|(r, c)| matrix[r * stride + c]).collect();
        let mut expected = vec![9.0; packed_len(columns, rows)];
        pack(whole(&transposed, columns, rows), &mut expected);
        let mut got = vec![9.0; expected.len()];
        pack_transposed(Matrix { data: &matrix, stride, rows, columns }, &mut got);
        prop_assert_eq!(&got, &expected);
        let wide: Vec<f64> = matrix.iter().map(|x| f64::from(*x)).collect();
        let mut got = vec![9.0f64; expected.len()];
        pack_transposed(Matrix { data: &wide, stride, rows, columns }, &mut got);
        prop_assert!(got.iter().zip(&expected).all(|(got, expected)| *got == f64::from(*expected)));
    }

    #[test]
    fn a_row_has_the_same_bits_for_any_number_of_rows(
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
    fn a_transposed_panel_equals_the_panel_of_the_transpose(rows in 1usize..70, columns in 1usize..70) {
        let matrix = numbers(rows * columns, 5);
        let transposed: Vec<f32> =
            (0..rows * columns).map(|i| matrix[i % rows * columns + i / rows]).collect();
        let mut panels = vec![0.0; packed_len(rows, columns)];
        pack(whole(&matrix, rows, columns), &mut panels);
        let mut expected = vec![0.0; packed_len(columns, rows)];
        pack(whole(&transposed, columns, rows), &mut expected);
        let mut got = vec![1.0; packed_len(columns, rows)];
        for (p, out) in got.chunks_exact_mut(columns * LANES).enumerate() {
            pack_transposed_panel(Packed { panels: &panels, rows, columns }, p, out);
        }
        prop_assert_eq!(got, expected);
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn kernels_for_other_processors_than_this_one_are_reported_as_not_tested() {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    for (name, tested) in [("AVX-512", is_x86_feature_detected!("avx512f")), ("AVX2 and FMA", avx2)] {
        if !tested {
            skip_part(&format!("the processor has no {name}"));
        }
    }
}

#[test]
#[should_panic(expected = "left operand")]
fn a_short_operand_is_refused() {
    let mut c = case(4, 8, 8, 1);
    c.a.truncate(20);
    product(&c, 0, 4, &mut [0.0; 32]).run();
}

#[test]
fn a_shape_whose_offsets_overflow_is_refused() {
    let c = case(2, 2, 8, 1);
    let refused = |spoil: fn(&mut Product<'_, f32>)| {
        let mut out = [0.0; 16];
        let mut p = product(&c, 0, 2, &mut out);
        spoil(&mut p);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| p.run())).is_err()
    };
    assert!(!refused(|_| ()));
    assert!(refused(|p| (p.rows, p.left.row_stride) = ((1 << 63) + 1, 2)));
    assert!(refused(|p| (p.depth, p.left.step_stride) = (3, usize::MAX / 2 + 1)));
    assert!(refused(|p| (p.depth, p.left.step_stride) = (1 << 59, 0)));
    assert!(refused(|p| (p.rows, p.output.stride) = ((1 << 60) + 1, 16)));
    assert!(refused(|p| p.output.stride = 7));
    assert!(refused(|p| p.columns = usize::MAX));
    assert!(refused(|p| p.start = Start::Bias(&[0.0; 8])));
}

#[test]
fn the_relu_keeps_a_nan_on_every_instruction_set() {
    let mut c = case(3, 4, 40, 1);
    c.a[5] = f32::NAN;
    let mut out = vec![0.0; 3 * 40];
    let relu = |out: &mut Vec<f32>, kernel: fn(&mut Product<'_, f32>)| {
        let mut p = product(&c, 0, 3, out);
        p.relu = true;
        kernel(&mut p);
        out.iter().enumerate().all(|(i, x)| if i / 40 == 1 { x.is_nan() } else { *x >= 0.0 })
    };
    assert!(relu(&mut out, product_portable));
    assert!(relu(&mut out, product_f32));
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: just detected; `product` made the shape consistent.
        assert!(relu(&mut out, |p| unsafe { product_avx2(p) }));
    }
}
