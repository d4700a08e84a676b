use super::*;
use proptest::prelude::*;

const LIMITS: QueueLimits = QueueLimits {
    queue: Size { samples: 50, bytes: 5000 },
    batch: Size { samples: 10, bytes: 1000 },
    max_delay: Duration::from_micros(100),
    default_deadline: Duration::from_secs(10),
    workers: 2,
};

const NORMAL: Terms = Terms { deadline: None, priority: Priority::Normal };

const COMPUTED: Computed = Computed { samples: 10, time: Duration::from_micros(10) };

fn entry(item: u64, samples: usize, queued: Instant) -> Entry<u64> {
    Entry { size: Size { samples, bytes: samples * 10 }, queued, terms: NORMAL, item }
}

/// Admits and queues an entry. Returns the items that it displaces.
fn push<T>(queue: &mut Queue<T>, entry: Entry<T>) -> Result<Vec<T>, QueueRefusal> {
    let displaced = queue.admit(entry.size, entry.queued, entry.terms)?;
    queue.push(entry);
    Ok(displaced.into_iter().map(|entry| entry.item).collect())
}

#[test]
fn a_lone_request_is_taken_at_once_by_an_idle_model() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    push(&mut queue, entry(1, 1, now)).unwrap();
    assert_eq!(queue.take(now, &mut taken), Next::Work);
    assert_eq!(taken.batch.len(), 1);
}

#[test]
fn a_batch_fills_for_at_most_the_delay_while_half_of_the_workers_compute() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    push(&mut queue, entry(1, 1, now)).unwrap();
    queue.take(now, &mut taken);
    taken.batch.clear();
    push(&mut queue, entry(2, 4, now)).unwrap();
    let due = now + LIMITS.max_delay;
    assert_eq!(queue.take(now, &mut taken), Next::Wait(due));
    assert!(taken.batch.is_empty());
    assert_eq!(queue.next(due), Next::Work, "the delay is over");
    push(&mut queue, entry(3, 6, now)).unwrap();
    assert_eq!(queue.next(now), Next::Work, "the batch is full");
}

#[test]
fn requests_do_not_wait_while_fewer_than_half_of_the_workers_compute() {
    let (mut queue, now) = (Queue::new(QueueLimits { workers: 5, ..LIMITS }), Instant::now());
    for item in 0..3 {
        let mut taken = Taken::default();
        push(&mut queue, entry(item, 1, now)).unwrap();
        assert_eq!(queue.take(now, &mut taken), Next::Work, "{item} of 5 compute");
    }
    push(&mut queue, entry(3, 1, now)).unwrap();
    assert_eq!(queue.next(now), Next::Wait(now + LIMITS.max_delay), "3 of 5 compute");
    queue.finish(COMPUTED);
    assert_eq!(queue.next(now), Next::Work, "2 of 5 compute");
}

#[test]
fn a_worker_that_finishes_takes_queued_requests_without_delay() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    push(&mut queue, entry(1, 1, now)).unwrap();
    queue.take(now, &mut taken);
    push(&mut queue, entry(2, 1, now)).unwrap();
    queue.finish(COMPUTED);
    assert_eq!(queue.next(now), Next::Work);
}

#[test]
fn an_entry_larger_than_a_batch_is_taken_alone() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    push(&mut queue, entry(1, 30, now)).unwrap();
    push(&mut queue, entry(2, 1, now)).unwrap();
    queue.take(now, &mut taken);
    assert_eq!(taken.batch.iter().map(|e| e.item).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_closed_queue_refuses_pushes_and_can_be_emptied() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    push(&mut queue, entry(1, 1, now)).unwrap();
    queue.close();
    assert_eq!(push(&mut queue, entry(2, 1, now)), Err(QueueRefusal::Closed));
    assert_eq!(queue.take(now, &mut taken), Next::Work);
    queue.finish(COMPUTED);
    assert_eq!(queue.next(now), Next::Stop);
}

#[test]
fn a_batch_is_filled_by_priority_and_within_one_in_order() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    for (item, priority) in [Priority::Low, Priority::Normal, Priority::High, Priority::Low, Priority::High]
        .into_iter()
        .enumerate()
    {
        let terms = Terms { priority, ..NORMAL };
        push(&mut queue, Entry { terms, ..entry(item as u64, 3, now) }).unwrap();
    }
    queue.take(now, &mut taken);
    assert_eq!(taken.batch.iter().map(|entry| entry.item).collect::<Vec<_>>(), [2, 4, 1]);
}

#[test]
fn a_low_priority_waits_for_those_above_it_that_come_soon() {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    let low = Terms { priority: Priority::Low, ..NORMAL };
    push(&mut queue, Entry { terms: low, ..entry(1, 10, now) }).unwrap();
    let later = now + GIVES_WAY;
    push(&mut queue, entry(2, 10, later - Duration::from_millis(1))).unwrap();
    push(&mut queue, entry(3, 10, later + Duration::from_millis(1))).unwrap();
    let mut order = Vec::new();
    for _ in 0..3 {
        queue.take(later, &mut taken);
        order.extend(taken.batch.drain(..).map(|entry| entry.item));
    }
    assert_eq!(order, [2, 1, 3]);
}

#[test]
fn a_full_queue_displaces_the_newest_of_the_lowest_priority_and_only_if_that_helps() {
    let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
    let terms = |priority| Terms { priority, ..NORMAL };
    let mut offer = |item, samples, priority| {
        push(&mut queue, Entry { terms: terms(priority), ..entry(item, samples, now) })
    };
    for (item, priority) in [Priority::Low, Priority::Low, Priority::Normal].into_iter().enumerate() {
        assert_eq!(offer(item as u64, 15, priority), Ok(vec![]));
    }
    assert!(offer(3, 10, Priority::Low).is_err(), "its own priority does not give way");
    let refused = QueueRefusal::Full {
        queued: Size { samples: 15, bytes: 150 },
        size: Size { samples: 36, bytes: 360 },
    };
    assert_eq!(offer(4, 36, Priority::Normal), Err(refused));
    assert_eq!(offer(5, 10, Priority::Normal), Ok(vec![1]));
    assert_eq!(offer(6, 30, Priority::High), Ok(vec![0, 5]));
}

/// A queued entry as the model knows it.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    number: u64,
    size: Size,
    terms: Terms,
    queued: Instant,
    turn: Turn,
}

impl Waiting {
    /// The order of the queue.
    fn order(&self) -> (Instant, u64) {
        (self.queued + GIVES_WAY * self.terms.priority as u32, self.number)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        size: Size,
        priority: Priority,
        lives_us: Option<u64>,
    },
    Take,
    Finish,
    /// The ticket of a queued entry is dropped.
    Cancel(prop::sample::Index),
    /// The last entry that was taken is queued again.
    Again,
    PassUs(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let sizes = (1usize..20, 0usize..2000).prop_map(|(samples, bytes)| Size { samples, bytes });
    let push = (sizes, prop::sample::select(&Priority::ALL[..]), prop::option::of(0u64..300));
    prop_oneof![
        6 => push.prop_map(|(size, priority, lives_us)| Step::Push { size, priority, lives_us }),
        3 => Just(Step::Take),
        2 => Just(Step::Finish),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        1 => Just(Step::Again),
        1 => (0u64..200).prop_map(Step::PassUs),
        // Longer than the low priorities give way.
        1 => (9_000_000u64..30_000_000).prop_map(Step::PassUs),
    ]
}

fn sum<'a>(entries: impl IntoIterator<Item = &'a Waiting>) -> Size {
    entries.into_iter().fold(Size::default(), |sum, entry| sum.plus(entry.size))
}

/// What an entry displaces from a full queue: the newest entries of the lowest priority, and so on.
fn displaced(waiting: &[Waiting], size: Size) -> Vec<u64> {
    let mut left = waiting.to_vec();
    let mut gone = Vec::new();
    while sum(&left).plus_within(size, LIMITS.queue).is_none() {
        let last = left.iter().max_by_key(|entry| (entry.terms.priority, entry.order())).unwrap().number;
        left.retain(|entry| entry.number != last);
        gone.push(last);
    }
    gone
}

proptest! {
    #[test]
    fn nothing_is_lost_or_out_of_turn_and_every_limit_holds(
        steps in prop::collection::vec(step(), 1..200)
    ) {
        let mut queue = Queue::new(LIMITS);
        let mut now = Instant::now();
        // The model: a list of the accepted entries in their order.
        let mut waiting: Vec<Waiting> = Vec::new();
        let mut last_taken: Option<Waiting> = None;
        let mut taken_at: Option<Instant> = None;
        let (mut number, mut computing) = (0u64, 0usize);
        let mut ends = steps;
        ends.extend([Step::Finish, Step::Take]);
        for step in ends {
            match step {
                Step::Push { size, priority, lives_us } => {
                    number += 1;
                    let deadline = lives_us.map(|us| now + Duration::from_micros(us));
                    let terms = Terms { deadline, priority };
                    let before = sum(waiting.iter().filter(|entry| entry.terms.priority <= priority));
                    let next = waiting.iter().find(|entry| entry.terms.priority <= priority);
                    let waits = next.map(|entry| now - taken_at.unwrap_or(entry.queued).max(entry.queued));
                    let stuck = waits.filter(|waits| *waits > LIMITS.default_deadline);
                    match queue.admit(size, now, terms) {
                        Ok(gone) => {
                            prop_assert_eq!(stuck, None);
                            let gone: Vec<u64> = gone.iter().map(|entry| entry.item).collect();
                            prop_assert_eq!(&gone, &displaced(&waiting, size));
                            waiting.retain(|entry| !gone.contains(&entry.number));
                            let turn = queue.push(Entry { size, queued: now, terms, item: number });
                            waiting.push(Waiting { number, size, terms, queued: now, turn });
                            prop_assert!(sum(&waiting).plus_within(Size::default(), LIMITS.queue).is_some());
                        }
                        Err(QueueRefusal::Full { queued, size: refused }) => {
                            prop_assert_eq!((queued, refused), (before, size));
                            prop_assert!(before.plus_within(size, LIMITS.queue).is_none());
                        }
                        Err(QueueRefusal::Stuck { waits }) => prop_assert_eq!(stuck, Some(waits)),
                        // Only a measured speed refuses more, and here nothing takes time.
                        Err(refused) => prop_assert!(false, "{refused:?}"),
                    }
                }
                Step::Take => {
                    let mut taken = Taken::default();
                    let next = queue.take(now, &mut taken);
                    let count = taken.batch.len() + taken.expired.len();
                    prop_assert_eq!(next == Next::Work, count > 0);
                    taken_at = if count > 0 { Some(now) } else { taken_at };
                    prop_assert_eq!(next == Next::Sleep, waiting.is_empty());
                    let gone: Vec<Waiting> = waiting.drain(..count).collect();
                    let expired = |entry: &Waiting| entry.terms.deadline.is_some_and(|d| d <= now);
                    let chosen = |dead: bool| -> Vec<u64> {
                        gone.iter().filter(|entry| expired(entry) == dead).map(|entry| entry.number).collect()
                    };
                    let numbers = |entries: &[Entry<u64>]| -> Vec<u64> {
                        entries.iter().map(|entry| entry.item).collect()
                    };
                    prop_assert_eq!(numbers(&taken.expired), chosen(true));
                    prop_assert_eq!(numbers(&taken.batch), chosen(false));
                    let size = taken.batch.iter().fold(Size::default(), |sum, entry| sum.plus(entry.size));
                    let within = size.plus_within(Size::default(), LIMITS.batch).is_some();
                    prop_assert!(within || taken.batch.len() == 1);
                    computing += usize::from(!taken.batch.is_empty());
                    last_taken = gone.last().copied().or(last_taken);
                }
                Step::Finish => {
                    if computing > 0 {
                        queue.finish(Computed { time: Duration::ZERO, ..COMPUTED });
                        computing -= 1;
                    }
                }
                Step::Cancel(which) => {
                    if !waiting.is_empty() {
                        let gone = waiting.remove(which.index(waiting.len()));
                        prop_assert_eq!(queue.remove(gone.turn).map(|entry| entry.item), Some(gone.number));
                        prop_assert!(queue.remove(gone.turn).is_none());
                    }
                }
                Step::Again => {
                    let held = sum(&waiting);
                    let fits = |entry: &mut Waiting| held.plus_within(entry.size, LIMITS.queue).is_some();
                    if let Some(again) = last_taken.take_if(fits) {
                        let Waiting { number, size, terms, queued, turn } = again;
                        queue.push_again(turn, Entry { size, queued, terms, item: number });
                        waiting.push(again);
                    }
                }
                Step::PassUs(us) => now += Duration::from_micros(us),
            }
            waiting.sort_by_key(Waiting::order);
            prop_assert_eq!(queue.held(), sum(&waiting));
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
    push(&mut queue, entry(1, 10, now)).unwrap();
    push(&mut queue, entry(2, 10, now)).unwrap();
    (queue, now + busy)
}

#[test]
fn a_queue_that_does_not_move_refuses_requests_behind_those_that_have_waited_too_long() {
    let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
    let low = Terms { priority: Priority::Low, ..NORMAL };
    push(&mut queue, Entry { terms: low, ..entry(1, 1, now) }).unwrap();
    let later = now + LIMITS.default_deadline + Duration::from_secs(1);
    let stuck = Err(QueueRefusal::Stuck { waits: Duration::from_secs(11) });
    assert_eq!(push(&mut queue, Entry { terms: low, ..entry(2, 1, later) }), stuck);
    // A low priority may wait for others, and a queue that moves may be long.
    push(&mut queue, entry(3, 1, later)).unwrap();
    queue.take(later, &mut Taken::default());
    push(&mut queue, Entry { terms: low, ..entry(4, 1, now) }).unwrap();
    push(&mut queue, Entry { terms: low, ..entry(5, 1, later) }).unwrap();
}

#[test]
fn a_burst_is_queued_whatever_it_takes() {
    let (mut queue, now) = slow_queue(Duration::from_millis(99));
    let deadline = Some(now + Duration::from_millis(1));
    assert_eq!(
        push(&mut queue, Entry { terms: Terms { deadline, ..NORMAL }, ..entry(3, 1, now) }),
        Ok(vec![])
    );
}

#[test]
fn a_standing_queue_refuses_what_would_wait_for_a_twentieth_of_its_time() {
    let (mut queue, now) = slow_queue(Duration::from_millis(100));
    let wait = Duration::from_secs(2);
    let refused = |limit| Err(QueueRefusal::TooLate(TooLate { wait, limit }));
    let mut try_push = |deadline: Option<u64>| {
        let deadline = deadline.map(|seconds| now + Duration::from_secs(seconds));
        push(&mut queue, Entry { terms: Terms { deadline, ..NORMAL }, ..entry(3, 1, now) })
    };
    assert_eq!(try_push(None), refused(Duration::from_millis(500)), "the default deadline");
    assert_eq!(try_push(Some(39)), refused(Duration::from_millis(1950)));
    assert_eq!(try_push(Some(40)), Ok(vec![]));
}

#[test]
fn slow_first_batches_of_a_process_refuse_no_request() {
    let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
    (0..4).for_each(|_| queue.finish(Computed { samples: 10, time: Duration::from_millis(100) }));
    push(&mut queue, entry(1, 10, now)).unwrap();
    push(&mut queue, entry(2, 10, now)).unwrap();
    let later = now + Duration::from_millis(200);
    let terms = Terms { deadline: Some(later + Duration::from_millis(30)), ..NORMAL };
    assert_eq!(push(&mut queue, Entry { terms, ..entry(3, 1, later) }), Ok(vec![]));
    queue.finish(Computed { samples: 10, time: Duration::from_secs(1) });
    assert!(push(&mut queue, Entry { terms, ..entry(4, 1, later) }).is_err(), "now its speed is known");
}

#[test]
fn a_pause_during_one_small_batch_refuses_no_request_after_it() {
    let (mut queue, now) = (Queue::new(LIMITS), Instant::now());
    for _ in 0..1000 {
        queue.finish(Computed { samples: 10, time: Duration::from_millis(1) });
    }
    queue.finish(Computed { samples: 1, time: Duration::from_millis(200) });
    push(&mut queue, entry(1, 10, now)).unwrap();
    push(&mut queue, entry(2, 10, now)).unwrap();
    let later = now + Duration::from_millis(200);
    // The 20 samples before it take 1 ms, and 1.2 ms with the pause. A twentieth of 30 ms is 1.5 ms.
    let terms = Terms { deadline: Some(later + Duration::from_millis(30)), ..NORMAL };
    assert_eq!(push(&mut queue, Entry { terms, ..entry(3, 1, later) }), Ok(vec![]));
}

#[test]
fn a_queue_that_ran_empty_accepts_again() {
    let (mut queue, now) = slow_queue(Duration::from_millis(100));
    let mut taken = Taken::default();
    queue.take(now, &mut taken);
    assert!(push(&mut queue, entry(3, 1, now)).is_err(), "one of two batches was taken");
    queue.take(now, &mut taken);
    assert_eq!(push(&mut queue, entry(3, 1, now)), Ok(vec![]));
}

#[test]
fn a_standing_queue_of_low_priority_refuses_only_low_priorities() {
    let (mut queue, now) = slow_queue(Duration::from_millis(100));
    let mut offer = |priority| {
        let terms = Terms { priority, deadline: Some(now + Duration::from_secs(1)) };
        push(&mut queue, Entry { terms, ..entry(3, 1, now) })
    };
    assert!(offer(Priority::Low).is_err());
    assert!(offer(Priority::Normal).is_err());
    assert_eq!(offer(Priority::High), Ok(vec![]));
}

/// The items that are taken and those that expire, in order, from a queue that knows these batches and has
/// not been empty for `busy`. An entry is its number of samples, and the time from then until its deadline.
fn taken_and_expired(
    batches: &[Computed],
    busy: Duration,
    entries: &[(usize, Option<Duration>)],
) -> (Vec<u64>, Vec<u64>) {
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    batches.iter().for_each(|batch| queue.finish(*batch));
    for (item, &(samples, left)) in entries.iter().enumerate() {
        let deadline = left.map(|left| now + busy + left);
        let terms = Terms { deadline, ..NORMAL };
        push(&mut queue, Entry { terms, ..entry(item as u64, samples, now) }).unwrap();
    }
    assert_eq!(queue.take(now + busy, &mut taken), Next::Work);
    let items = |entries: &[Entry<u64>]| entries.iter().map(|entry| entry.item).collect();
    (items(&taken.batch), items(&taken.expired))
}

/// Batches of 10 samples that take 0.1 s for each.
const SLOW: [Computed; 2] = [Computed { samples: 10, time: Duration::from_secs(1) }; 2];

const LONG: Duration = Duration::from_millis(100);

#[test]
fn an_entry_of_a_standing_queue_whose_deadline_passes_while_it_is_computed_expires() {
    let left = |millis| Some(Duration::from_millis(millis));
    // Half of the mean time is the least: 0.2 s for four samples, and 0.1 s for two.
    let entries = [(4, left(199)), (4, left(201)), (2, left(99)), (2, left(101)), (1, None)];
    assert_eq!(taken_and_expired(&SLOW, LONG, &entries), (vec![1, 3, 4], vec![0, 2]));
}

#[test]
fn an_entry_expires_before_its_deadline_only_in_a_standing_queue_of_known_speed() {
    let soon = [(4, Some(Duration::from_millis(1)))];
    let taken = (vec![0], vec![]);
    assert_eq!(taken_and_expired(&SLOW, LONG - Duration::from_millis(1), &soon), taken, "a burst");
    assert_eq!(taken_and_expired(&[], LONG, &soon), taken, "nothing was computed");
    let first = Computed { samples: 10, time: Duration::from_millis(400) };
    assert_eq!(taken_and_expired(&[first], LONG, &soon), taken, "only the first batches were computed");
    assert_eq!(taken_and_expired(&SLOW, LONG, &soon), (vec![], vec![0]));
}

#[test]
fn a_batch_that_is_larger_than_those_before_is_not_expected_to_take_longer() {
    // A sample takes 0.1 s, but perhaps only because each batch takes so long by itself.
    let single = [Computed { samples: 1, time: Duration::from_millis(100) }; 20];
    let left = |millis| Some(Duration::from_millis(millis));
    let entries = [(10, left(49)), (10, left(51))];
    assert_eq!(taken_and_expired(&single, LONG, &entries), (vec![1], vec![0]));
}

#[test]
fn a_queue_whose_entries_have_all_expired_is_measured_again() {
    // The machine was paused in this batch.
    let paused = Computed { samples: 1, time: Duration::from_secs(60) };
    let (mut queue, now, mut taken) = (Queue::new(LIMITS), Instant::now(), Taken::default());
    queue.finish(paused);
    let terms = |now: Instant| Terms { deadline: Some(now + Duration::from_secs(1)), ..NORMAL };
    (0..3).for_each(|n| drop(push(&mut queue, Entry { terms: terms(now), ..entry(n, 1, now) }).unwrap()));
    let later = now + LONG;
    queue.take(later, &mut taken);
    assert_eq!((taken.batch.len(), taken.expired.len()), (0, 3));
    taken.expired.clear();
    push(&mut queue, Entry { terms: terms(later), ..entry(3, 1, later) }).unwrap();
    queue.take(later, &mut taken);
    assert_eq!((taken.batch.len(), taken.expired.len()), (1, 0));
}
