use proptest::prelude::*;

use super::layout::{F16Row, F32Row, Int8Row};
use super::*;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The outputs of every code path that this machine can run.
fn on_every_path(lookup: &PoolLookup, rows: &[Option<&[u8]>], samples: usize) -> Vec<Vec<u32>> {
    let stride = lookup.dim + 5;
    let run = |path: &dyn Fn(GatherPool)| {
        let mut out = vec![-1.0f32; samples * stride];
        path(GatherPool::new(lookup, rows, &mut out, stride).unwrap());
        bits(&out)
    };
    let mut outputs = vec![
        run(&|pool| match lookup.element {
            Element::F32 => pool.run_any::<F32Row>(),
            Element::F16 => pool.run_any::<F16Row>(),
            Element::Int8 => pool.run_any::<Int8Row>(),
        }),
        run(&|pool| pool.run()),
    ];
    #[cfg(target_arch = "x86_64")]
    if registers::has_avx2() {
        // SAFETY: the processor has AVX2, FMA and F16C.
        outputs.push(run(&|pool| unsafe {
            match lookup.element {
                Element::F32 => pool.run_avx2::<F32Row>(),
                Element::F16 => pool.run_avx2::<F16Row>(),
                Element::Int8 => pool.run_avx2::<Int8Row>(),
            }
        }));
    }
    outputs
}

#[test]
#[cfg(target_arch = "x86_64")]
fn kernels_for_other_processors_than_this_one_are_reported_as_not_tested() {
    if !registers::has_avx2() {
        crate::skip::skip_part("the processor has no AVX2, FMA and F16C");
    }
}

/// The reference: a plain loop over decoded rows.
fn oracle(lookup: &PoolLookup, rows: &[Option<&[u8]>]) -> Vec<u32> {
    let mut out = Vec::new();
    for bag in lookup.offsets.windows(2) {
        let mut sum = vec![0.0f32; lookup.dim];
        for i in bag[0]..bag[1] {
            let Some(row) = rows[i as usize] else { continue };
            let mut values = vec![0.0; lookup.dim];
            lookup.element.decode(row, &mut values);
            sum.iter_mut().zip(values).for_each(|(s, v)| *s = if i == bag[0] { v } else { *s + v });
        }
        if lookup.mean && bag[1] > bag[0] + 1 {
            sum.iter_mut().for_each(|s| *s /= (bag[1] - bag[0]) as f32);
        }
        out.extend([-1.0; 3].iter().chain(&sum).chain(&[-1.0; 2]));
    }
    bits(&out)
}

proptest! {
    #[test]
    fn every_width_and_element_type_gives_the_bits_of_a_plain_loop(
        dim in prop::sample::select(vec![1usize, 7, 16, 32, 40, 64, 128]),
        element in prop::sample::select(Element::ALL.to_vec()),
        mean in any::<bool>(),
        sizes in prop_oneof![
            (1usize..40).prop_map(|samples| vec![1; samples]),
            prop::collection::vec(0u32..6, 1..12),
        ],
        seed in any::<u32>(),
    ) {
        let hash = |x: usize| (x as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed);
        let value = |x: u32| (f64::from(x) / f64::from(u32::MAX) - 0.5) as f32;
        // One byte before the rows, so that they are unaligned.
        let bytes = element.row_bytes(dim);
        let mut table = vec![0; 1 + 10 * bytes];
        for (r, out) in table[1..].chunks_exact_mut(bytes).enumerate() {
            let row: Vec<f32> = (0..dim).map(|i| value(hash(r * dim + i))).collect();
            element.encode(&row, out).unwrap();
        }
        let mut offsets = vec![0];
        sizes.iter().for_each(|size| offsets.push(offsets[offsets.len() - 1] + size));
        // Ids from 10 on read as zeros.
        let ids = 0..offsets[offsets.len() - 1] as usize;
        let row = |i| table[1..].chunks_exact(bytes).nth(hash(i) as usize % 13);
        let rows: Vec<_> = ids.map(row).collect();
        let lookup = PoolLookup { offsets: &offsets, dim, element, mean, column: 3 };
        let expected = oracle(&lookup, &rows);
        for got in on_every_path(&lookup, &rows, sizes.len()) {
            prop_assert_eq!(&got, &expected);
        }
    }

    #[test]
    fn blocks_cover_the_lookup_in_order(
        sizes in prop::collection::vec(0u32..200, 0..70),
        start in 0u32..9,
        dim in 1usize..300,
    ) {
        let mut offsets = vec![start];
        sizes.iter().for_each(|size| offsets.push(offsets[offsets.len() - 1] + size));
        let whole = PoolLookup { offsets: &offsets, dim, element: Element::F32, mean: false, column: 2 };
        let (mut sample, mut occurrence) = (0, start as usize);
        for (samples, block) in whole.blocks() {
            prop_assert_eq!(samples.start, sample);
            prop_assert!(!samples.is_empty());
            prop_assert_eq!(block.offsets, &offsets[samples.start..=samples.end]);
            prop_assert_eq!(block.occurrences().start, occurrence);
            (sample, occurrence) = (samples.end, block.occurrences().end);
        }
        prop_assert_eq!((sample, occurrence), (sizes.len(), offsets[sizes.len()] as usize));
    }
}

#[test]
fn every_path_decodes_every_f16_exactly() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dim in [16, 32, 64, 128, 8] {
        let rows: Vec<_> = all.chunks_exact(2 * dim).map(Some).collect();
        let offsets: Vec<u32> = (0..=rows.len() as u32).collect();
        let lookup = PoolLookup { offsets: &offsets, dim, element: Element::F16, mean: false, column: 3 };
        let expected = oracle(&lookup, &rows);
        for (path, got) in on_every_path(&lookup, &rows, rows.len()).into_iter().enumerate() {
            assert!(got == expected, "dim {dim}, path {path}");
        }
    }
}

#[test]
fn bags_are_pooled_in_id_order_into_their_columns() {
    let table = [1.0f32, 2.0, 10.0, 20.0, 100.0, 200.0];
    let ids = [0usize, 1, 2, 2, 9];
    let rows = ids.map(|id| table.chunks_exact(2).nth(id).map(bytemuck::cast_slice));
    let pool = |mean| {
        let mut out = vec![-1.0f32; 4 * 3];
        let lookup = PoolLookup { offsets: &[0, 1, 1, 4, 5], dim: 2, element: Element::F32, mean, column: 1 };
        gather_pool(&lookup, &rows, &mut out, 3);
        out
    };
    assert_eq!(pool(false), [-1., 1., 2., -1., 0., 0., -1., 210., 420., -1., 0., 0.]);
    assert_eq!(pool(true), [-1., 1., 2., -1., 0., 0., -1., 70., 140., -1., 0., 0.]);
}

#[test]
fn inconsistent_shapes_are_refused_on_every_path() {
    let row = [1u8; 64];
    let pool = |lookup: PoolLookup<'_>, rows: &[Option<&[u8]>], stride: usize, len: usize| {
        let mut out = vec![0.0f32; len];
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            gather_pool(&lookup, rows, &mut out, stride);
        }))
        .is_ok()
    };
    for dim in [7, 16] {
        let rows = [Some(&row[..4 * dim]); 3];
        let element = Element::F32;
        let lookup = PoolLookup { offsets: &[0, 1, 3], dim, element, mean: false, column: 0 };
        assert!(pool(lookup, &rows, 20, 40));
        assert!(pool(PoolLookup { offsets: &[], ..lookup }, &rows, 20, 0), "no samples");
        assert!(!pool(lookup, &rows[..2], 20, 40), "one row too few");
        assert!(!pool(lookup, &rows, 20, 20 + dim - 1), "no room for the last sample");
        assert!(!pool(lookup, &rows, dim - 1, 40), "columns beyond the stride");
        assert!(!pool(PoolLookup { column: usize::MAX - dim + 1, ..lookup }, &rows, 20, 40));
        assert!(!pool(PoolLookup { offsets: &[0, 3, 1], ..lookup }, &rows, 20, 40), "decreasing offsets");
        assert!(!pool(lookup, &[Some(&row[..4 * dim - 1]); 3], 20, 40), "short rows");
        let f16 = PoolLookup { element: Element::F16, ..lookup };
        assert!(!pool(f16, &rows, 20, 40), "rows of another element type");
    }
}

#[test]
fn a_bag_of_one_is_the_row_itself_to_the_bit() {
    for dim in [1, 16] {
        let element = Element::F32;
        let lookup = PoolLookup { offsets: &[0, 1], dim, element, mean: true, column: 0 };
        let mut out = vec![1.0f32; dim];
        gather_pool(&lookup, &[Some(bytemuck::cast_slice(&[-0.0f32; 16][..dim]))], &mut out, dim);
        assert!(out.iter().all(|x| x.to_bits() == (-0.0f32).to_bits()));
    }
}
