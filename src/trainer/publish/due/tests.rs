use super::*;

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn by_steps_a_cut_is_due_at_every_multiple_that_was_passed_since_the_last_cut() {
    let mut due = Due::new(Every::Steps(10), 4, false);
    assert_eq!((due.steps_to_cut(4), due.steps_to_cut(10)), (6, 10));
    assert!(!due.is_time(9) && due.is_time(10) && due.is_time(25));
    // A cut that comes late does not move the next one.
    due.note_cut(13);
    assert!(!due.is_time(19) && due.is_time(20));
    assert!(!due.waits(19) && !due.may_wait(), "only a step makes a cut due");
}

#[test]
fn by_time_a_cut_is_due_after_the_interval_if_a_step_was_taken() {
    let mut due = Due::new(Every::Time(LONG), 4, false);
    assert_eq!(due.steps_to_cut(4), u64::MAX);
    assert!(!due.is_time(5) && due.waits(5) && due.may_wait());
    due.every = Every::Time(Duration::ZERO);
    assert!(due.is_time(5));
    assert!(!due.is_time(4) && !due.waits(4), "there is nothing new");
    assert!(due.may_wait());
}

#[test]
fn a_version_that_could_not_be_written_is_due_again_without_a_step() {
    for every in [Every::Steps(10), Every::Time(LONG)] {
        let mut due = Due::new(every, 4, false);
        due.owed = true;
        assert!(!due.is_time(4) && due.waits(4) && due.may_wait(), "{every:?}");
        due.retry_owed = Duration::ZERO;
        assert!(due.is_time(4), "{every:?}");
        due.note_cut(4);
        assert!(!due.is_time(4) && !due.waits(4), "{every:?}");
    }
    // The interval is shorter than the time between attempts.
    let mut due = Due::new(Every::Time(Duration::ZERO), 4, false);
    due.owed = true;
    assert!(due.is_time(4));
}

#[test]
fn a_cut_may_come_early_unless_the_last_one_failed_just_before() {
    let mut due = Due::new(Every::Time(LONG), 4, true);
    assert!(due.may_come_early());
    due.note_cut(9);
    due.retry_after = LONG;
    assert!(!due.may_come_early());
    due.retry_after = Duration::ZERO;
    assert!(due.may_come_early());
    (due.retry_after, due.published_steps) = (LONG, Some(9));
    assert!(due.may_come_early());
}

#[test]
fn after_a_refusal_no_cut_comes_early_and_the_next_one_comes_at_its_time() {
    let mut due = Due::new(Every::Steps(10), 4, true);
    due.retry_after = Duration::ZERO;
    due.note_refused(9);
    assert!(!due.may_come_early() && !due.is_time(9) && due.is_time(10));
    due.note_cut(10);
    assert!(due.may_come_early());
    let every = Duration::from_secs(60);
    let mut due = Due::new(Every::Time(every), 4, true);
    due.last_cut = Instant::now().checked_sub(every / 2).unwrap();
    let last_cut = due.last_cut;
    due.note_refused(9);
    assert_eq!(due.last_cut, last_cut, "the interval goes on");
    due.last_cut = Instant::now().checked_sub(every).unwrap();
    assert!(due.is_time(10));
    due.note_refused(10);
    assert!(!due.is_time(11), "the next interval has begun");
}
