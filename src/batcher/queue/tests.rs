use super::*;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    queue: Size { samples: 50, bytes: 5000 },
    batch: Size { samples: 10, bytes: 1000 },
    max_delay: Duration::from_micros(100),
    default_deadline: Duration::from_secs(10),
    workers: 2,
};

const COMPUTED: Computed = Computed { samples: 10, time: Duration::from_micros(10) };

fn entry(item: u64, samples: usize, queued: Instant) -> Entry<u64> {
    Entry { size: Size { samples, bytes: samples * 10 }, queued, deadline: None, item }
}

#[test]
fn a_lone_request_is_taken_at_once_by_an_idle_model() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.push(entry(1, 1, now)).unwrap();
    assert_eq!(queue.take(now, |_| false, &mut taken), Next::Work);
    assert_eq!(taken.batch.len(), 1);
}

#[test]
fn a_batch_fills_for_at_most_the_delay_while_another_is_computed() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.push(entry(1, 1, now)).unwrap();
    queue.take(now, |_| false, &mut taken);
    taken.batch.clear();
    queue.push(entry(2, 4, now)).unwrap();
    let due = now + LIMITS.max_delay;
    assert_eq!(queue.take(now, |_| false, &mut taken), Next::Wait(due));
    assert!(taken.batch.is_empty());
    assert_eq!(queue.next(due), Next::Work, "the delay is over");
    queue.push(entry(3, 6, now)).unwrap();
    assert_eq!(queue.next(now), Next::Work, "the batch is full");
}

#[test]
fn a_worker_that_finishes_takes_queued_requests_without_delay() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.push(entry(1, 1, now)).unwrap();
    queue.take(now, |_| false, &mut taken);
    queue.push(entry(2, 1, now)).unwrap();
    queue.finish(COMPUTED);
    assert_eq!(queue.next(now), Next::Work);
}

#[test]
fn an_entry_larger_than_a_batch_is_taken_alone() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.push(entry(1, 30, now)).unwrap();
    queue.push(entry(2, 1, now)).unwrap();
    queue.take(now, |_| false, &mut taken);
    assert_eq!(taken.batch.iter().map(|e| e.item).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_closed_queue_refuses_pushes_and_can_be_emptied() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.push(entry(1, 1, now)).unwrap();
    queue.close();
    assert_eq!(queue.push(entry(2, 1, now)), Err(Refused::Closed));
    assert_eq!(queue.take(now, |_| false, &mut taken), Next::Work);
    queue.finish(COMPUTED);
    assert_eq!(queue.next(now), Next::Stop);
}

/// Number, size and deadline of a queued entry, and whether it is cancelled.
type Waiting = (u64, Size, Option<Instant>, bool);

#[derive(Clone, Debug)]
enum Step {
    Push { samples: usize, bytes: usize, lives_us: Option<u64>, cancelled: bool },
    Take,
    Finish,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let push = (1usize..20, 0usize..2000, prop::option::of(0u64..300), prop::bool::weighted(0.1));
    prop_oneof![
        4 => push.prop_map(|(samples, bytes, lives_us, cancelled)| {
            Step::Push { samples, bytes, lives_us, cancelled }
        }),
        3 => Just(Step::Take),
        2 => Just(Step::Finish),
        1 => (0u64..200).prop_map(Step::Pass),
    ]
}

proptest! {
    #[test]
    fn nothing_is_lost_or_reordered_and_every_limit_holds(
        steps in prop::collection::vec(step(), 1..200)
    ) {
        let mut queue = Queue::new(LIMITS);
        let mut now = Instant::now();
        // The model: a plain list of the accepted entries.
        let mut waiting: VecDeque<Waiting> = VecDeque::new();
        let (mut number, mut computing) = (0u64, 0usize);
        let mut ends = steps;
        ends.extend([Step::Finish, Step::Take]);
        for step in ends {
            match step {
                Step::Push { samples, bytes, lives_us, cancelled } => {
                    number += 1;
                    let size = Size { samples, bytes };
                    let deadline = lives_us.map(|us| now + Duration::from_micros(us));
                    let item = (number, cancelled);
                    let sum = |f: fn(&Size) -> usize| waiting.iter().map(|w| f(&w.1)).sum::<usize>();
                    let held = Size { samples: sum(|s| s.samples), bytes: sum(|s| s.bytes) };
                    let fits = held.samples + samples <= LIMITS.queue.samples
                        && held.bytes + bytes <= LIMITS.queue.bytes;
                    match queue.push(Entry { size, queued: now, deadline, item }) {
                        Ok(()) => {
                            prop_assert!(fits);
                            waiting.push_back((number, size, deadline, cancelled));
                        }
                        Err(refused) => {
                            prop_assert!(!fits);
                            prop_assert_eq!(refused, Refused::Full { queued: held, size });
                        }
                    }
                }
                Step::Take => {
                    let mut taken = Taken::default();
                    let next = queue.take(now, |item| item.1, &mut taken);
                    let count = taken.batch.len() + taken.expired.len() + taken.cancelled.len();
                    prop_assert_eq!(next == Next::Work, count > 0);
                    prop_assert_eq!(next == Next::Sleep, waiting.is_empty());
                    let gone: Vec<_> = waiting.drain(..count).collect();
                    let expired = |w: &Waiting| w.2.is_some_and(|d| d <= now);
                    let numbers = |entries: &[Entry<(u64, bool)>]| -> Vec<u64> {
                        entries.iter().map(|e| e.item.0).collect()
                    };
                    let chosen = |f: &dyn Fn(&Waiting) -> bool| -> Vec<u64> {
                        gone.iter().filter(|w| f(w)).map(|w| w.0).collect()
                    };
                    prop_assert_eq!(numbers(&taken.expired), chosen(&|w| expired(w)));
                    prop_assert_eq!(numbers(&taken.cancelled), chosen(&|w| !expired(w) && w.3));
                    prop_assert_eq!(numbers(&taken.batch), chosen(&|w| !expired(w) && !w.3));
                    let samples: usize = taken.batch.iter().map(|e| e.size.samples).sum();
                    let bytes: usize = taken.batch.iter().map(|e| e.size.bytes).sum();
                    let within = samples <= LIMITS.batch.samples && bytes <= LIMITS.batch.bytes;
                    prop_assert!(within || taken.batch.len() == 1);
                    computing += usize::from(!taken.batch.is_empty());
                }
                Step::Finish => {
                    if computing > 0 {
                        queue.finish(COMPUTED);
                        computing -= 1;
                    }
                }
                Step::Pass(us) => now += Duration::from_micros(us),
            }
            let held = waiting.iter().map(|w| w.1.samples).sum::<usize>();
            prop_assert_eq!(queue.held().samples, held);
            prop_assert!(queue.held().samples <= LIMITS.queue.samples);
            if computing == 0 && !waiting.is_empty() {
                prop_assert_eq!(queue.next(now), Next::Work);
            }
        }
    }
}

/// A queue whose batches of 10 samples take two seconds, so a sample takes 0.1 s of the two workers. It has
/// not been empty for `busy`, and 20 samples wait.
fn slow_queue(busy: Duration) -> (Queue<u64>, Instant) {
    let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
    queue.finish(Computed { samples: 10, time: Duration::from_secs(2) });
    queue.push(entry(1, 10, now)).unwrap();
    queue.push(entry(2, 10, now)).unwrap();
    (queue, now + busy)
}

#[test]
fn a_burst_is_queued_whatever_it_takes() {
    let (mut queue, now) = slow_queue(Duration::from_millis(99));
    let deadline = Some(now + Duration::from_millis(1));
    assert_eq!(queue.push(Entry { deadline, ..entry(3, 1, now) }), Ok(()));
}

#[test]
fn a_standing_queue_refuses_what_would_wait_for_a_twentieth_of_its_time() {
    let (mut queue, now) = slow_queue(Duration::from_millis(100));
    let wait = Duration::from_secs(2);
    let refused = |limit| Err(Refused::TooLate(TooLate { wait, limit }));
    let mut push = |deadline: Option<u64>| {
        let deadline = deadline.map(|seconds| now + Duration::from_secs(seconds));
        queue.push(Entry { deadline, ..entry(3, 1, now) })
    };
    assert_eq!(push(None), refused(Duration::from_millis(500)), "the default deadline");
    assert_eq!(push(Some(39)), refused(Duration::from_millis(1950)));
    assert_eq!(push(Some(40)), Ok(()));
}

#[test]
fn a_queue_that_ran_empty_accepts_again() {
    let (mut queue, now) = slow_queue(Duration::from_millis(100));
    let mut taken = Taken::default();
    queue.take(now, |_| false, &mut taken);
    assert!(queue.push(entry(3, 1, now)).is_err(), "one of two batches was taken");
    queue.take(now, |_| false, &mut taken);
    assert_eq!(queue.push(entry(3, 1, now)), Ok(()));
}
