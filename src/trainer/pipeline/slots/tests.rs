use super::*;

struct Aligned(Vec<u128>);

impl HostBlock for Aligned {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(&mut self.0))
    }
}

struct Plain;

impl HostMemory for Plain {
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory> {
        Ok(Box::new(Aligned(vec![0; bytes.div_ceil(16)])))
    }
}

#[test]
fn rows_are_read_back_by_slot() {
    let slots = Slots::new(&Plain, 4, 2).unwrap();
    slots.claim(&[3, 1]).unwrap().write(&[1.0, 2.0, 3.0, 4.0]);
    let mut claim = slots.claim(&[0, 1, NO_SLOT, 3]).unwrap();
    assert_eq!(claim.row(0), Some(&[0.0, 0.0][..]));
    assert_eq!(claim.row(1), Some(&[3.0, 4.0][..]));
    assert_eq!((claim.row(2), claim.row(4)), (None, None));
    let mut rows = claim.rows_mut();
    rows.row_mut(0).unwrap()[0] = 5.0;
    rows.row_mut(3).unwrap()[1] = 6.0;
    assert!(rows.row_mut(2).is_none() && rows.row_mut(4).is_none());
    assert!(slots.claim(&[3]).is_err(), "claimed already");
    drop(claim);
    let mut out = [0.0; 4];
    slots.claim(&[0, 3]).unwrap().read(&mut out);
    assert_eq!(out, [5.0, 0.0, 1.0, 6.0]);
}

#[test]
fn many_rows_are_read_back_that_another_thread_wrote() {
    for width in [5, 128] {
        let count = 2 * MANY_BYTES / (width * size_of::<f32>());
        let slots = Slots::new(&Plain, count, width).unwrap();
        let list: Vec<u32> = (0..count as u32).rev().filter(|slot| slot % 3 > 0).collect();
        let rows: Vec<f32> = (0..list.len() * width).map(|word| word as f32).collect();
        assert!(size_of_val(&*rows) > MANY_BYTES);
        std::thread::scope(|scope| _ = scope.spawn(|| slots.claim(&list).unwrap().write(&rows)));
        let mut read = vec![0.0; rows.len()];
        slots.claim(&list).unwrap().read(&mut read);
        assert!(read == rows, "width {width}");
        let others: Vec<u32> = (0..count as u32).step_by(3).collect();
        let claim = slots.claim(&others).unwrap();
        assert!((0..others.len()).all(|k| claim.row(k).unwrap().iter().all(|&word| word == 0.0)));
    }
}

#[test]
fn a_thread_reads_what_another_thread_wrote_under_the_claim_before() {
    let slots = Slots::new(&Plain, 8, 16).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let Ok(mut claim) = slots.claim(&[2, 5]) else { continue };
                    let counts = claim.row(1).unwrap().to_vec();
                    assert!(counts.iter().all(|&c| c == counts[0]), "torn: {counts:?}");
                    claim.rows_mut().row_mut(1).unwrap().iter_mut().for_each(|x| *x += 1.0);
                }
            });
        }
    });
    assert!(slots.claim(&[5]).unwrap().row(0).unwrap()[3] > 0.0);
}
