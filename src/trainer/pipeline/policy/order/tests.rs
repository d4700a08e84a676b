use super::*;

#[test]
fn stale_entries_do_not_pile_up_in_the_queues() {
    let mut queues = RankQueues::new(4);
    for stamp in 0..100 {
        queues.push(stamp % 5, Candidate { slot: stamp % 3, stamp }, |_| None);
    }
    let entries: usize = queues.ranks.values().map(VecDeque::len).sum();
    assert!(entries <= 7 && queues.entries == entries, "{entries} entries of 4 slots");
    queues.push(7, Candidate { slot: 3, stamp: 100 }, |_| None);
    assert_eq!(queues.pop(|slot| (slot == 3).then_some(100), |_| ()), Some(3));
    assert_eq!((queues.pop(|_| Some(0), |_| ()), queues.entries, queues.ranks.len()), (None, 0, 0));
}
