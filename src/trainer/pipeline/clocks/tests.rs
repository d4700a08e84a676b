use super::*;
use std::thread::sleep;

#[test]
fn a_clock_runs_while_its_stage_works_and_stops_while_it_waits() {
    let clocks = Clocks::default();
    let long = Duration::from_millis(40);
    for _ in 0..2 {
        clocks.time(StageName::Plan, || {
            sleep(long);
            clocks.wait(StageName::Plan, || sleep(5 * long));
        });
    }
    let began = Instant::now();
    clocks.time(StageName::Train, || clocks.wait(StageName::Train, || sleep(long)));
    assert!(clocks.of(StageName::Plan) >= 2 * long);
    assert!(clocks.of(StageName::Train) <= began.elapsed() - long);
    assert_eq!(clocks.of(StageName::Load), Duration::ZERO);
}
