//! Batches that end in an error or a panic, on the simulator.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::*;
use crate::cache::{CacheOptions, CacheShape, TableShape};
use crate::device::cusim::SimDriver;
use crate::schema::Pooling;
use crate::types::{Element, Jagged};

/// A cache of one table, and a context with a staging buffer for four rows.
fn cache() -> (GpuCache<SimDriver>, LookupContext<SimDriver>) {
    let tables = vec![TableShape { rows: 500, row_bytes: 16 }];
    let options = CacheOptions { background: false, ..CacheOptions::default() };
    let driver = Arc::new(SimDriver::new(1, 1 << 30).unwrap());
    let cache = GpuCache::new(&CacheShape { bytes: 64 << 10, tables }, &options, driver).unwrap();
    let (table, element, pooling) = (TableId(0), Element::F32, Pooling::Sum);
    let shape = ContextShape {
        features: 1,
        lookups: vec![Lookup { feature: 0, table, dim: 4, element, pooling, column: 0 }],
        dense_width: 0,
        stride: 4,
        max_samples: 64,
        max_ids: 64,
        staging_bytes: Some(4 * 16),
        copy_bytes: 1 << 10,
    };
    let context = cache.context(&shape).unwrap();
    (cache, context)
}

fn batch(ids: std::ops::Range<u64>) -> Batch {
    let samples = ids.clone().count();
    let feature = Jagged { offsets: (0..=samples as u32).collect(), ids: ids.collect() };
    Batch { samples, features: vec![feature], ..Batch::default() }
}

/// Whether a batch is pinned.
fn is_pinned(cache: &GpuCache<SimDriver>) -> bool {
    cache.shared.epochs.oldest() <= cache.shared.epochs.tag()
}

#[test]
fn a_batch_that_ends_in_an_error_keeps_no_pin() {
    let (cache, mut context) = cache();
    let too_many = cache.embed(&mut context, &batch(0..5), |_| Ok::<_, GpuCacheError>(()));
    assert!(matches!(too_many, Err(GpuCacheError::Lookup(_))));
    assert!(!is_pinned(&cache));
    let refused = cache.embed(&mut context, &batch(0..4), |_| Err(GpuCacheError::SwitchFailed));
    assert!(matches!(refused, Err(GpuCacheError::SwitchFailed)));
    assert!(!is_pinned(&cache));
}

#[test]
fn a_batch_that_panics_is_pinned_until_its_kernels_end() {
    let (cache, mut context) = cache();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        cache
            .embed(&mut context, &batch(0..4), |_| -> Result<(), GpuCacheError> {
                panic!("while hits are copied")
            })
            .map(<[f32]>::len)
    }));
    assert!(panicked.is_err());
    assert!(!context.is_busy() && !is_pinned(&cache));
    let zeros = cache.embed(&mut context, &batch(0..4), |missing| {
        (0..missing.len()).for_each(|m| missing.bytes_mut(m).fill(0));
        Ok::<_, GpuCacheError>(())
    });
    assert_eq!(zeros.unwrap(), [0.0; 16]);
}
