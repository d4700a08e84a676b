//! When a watch ends a run.

use super::*;

#[test]
fn a_run_ends_for_a_cut_when_no_data_comes_and_not_because_a_step_takes_long() {
    let stop = Stop::default();
    let watch = Watch::start(&stop, &Shortage::default()).unwrap();
    watch.stepped(true);
    std::thread::sleep(3 * IDLE);
    assert!(!stop.paused(), "the reader does not wait");
    let _waiting = stop.begin_wait();
    let begun = Instant::now();
    while !stop.paused() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(TICK);
    }
}
