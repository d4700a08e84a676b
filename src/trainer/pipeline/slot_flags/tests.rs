use super::*;

#[test]
fn a_slot_is_claimed_once_at_a_time_and_a_refused_claim_takes_nothing() {
    let flags = SlotFlags::new(5);
    let first = flags.claim(&[1, NO_SLOT, 3]).unwrap();
    let refused = |list: &[u32]| flags.claim(list).err();
    assert_eq!(refused(&[0, 3]), Some(ClaimError { slot: 3, count: 5 }));
    assert_eq!(refused(&[2, 4, 2]), Some(ClaimError { slot: 2, count: 5 }), "twice in one");
    assert_eq!(refused(&[5]), Some(ClaimError { slot: 5, count: 5 }));
    drop(flags.claim(&[0, 2, 4]).unwrap());
    assert!(first.is_of(&flags) && !first.is_of(&SlotFlags::new(5)));
    drop(first);
    assert_eq!(flags.claim(&[0, 1, 2, 3, 4]).unwrap().list(), [0, 1, 2, 3, 4]);
}
