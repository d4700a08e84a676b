//! What is refused when calls take places, parts of their connections, and memory.

use tokio::runtime::Runtime;

use super::*;
use crate::fake::Fake;
use crate::predict::{Description, Predict, PredictError};
use crate::server::Server;
use crate::server::fuzz::parts_of;
use crate::types::{Batch, Scores};

/// A server of the model `ads` with so many places and bytes.
struct Bound {
    _runtime: Runtime,
    state: Arc<ServerState>,
}

impl Bound {
    fn new(places: usize, bytes: usize) -> Self {
        let mut parts = parts_of("[server]\ngrpc = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n");
        (parts.server.max_requests, parts.server.max_inflight_bytes) = (places, bytes);
        let runtime = Runtime::new().unwrap();
        let state = runtime.block_on(Server::bind(parts)).unwrap().state;
        Self { _runtime: runtime, state }
    }

    /// A call before its message.
    fn enter(&self, connection: &Arc<ConnectionState>, kind: CallKind) -> Result<Arc<Charge>, Status> {
        Charge::enter(&self.state, connection, None, kind)
    }

    /// A call of the model whose message has arrived.
    fn admit(&self, connection: &Arc<ConnectionState>, kind: CallKind) -> Result<Arc<Charge>, Status> {
        let charge = self.enter(connection, kind)?;
        charge.set_model("ads".to_owned());
        charge.admit(Priority::Normal).map(|()| charge)
    }
}

/// A second model.
struct Other(Arc<Fake>);

impl Predict for Other {
    fn predict(&self, batch: &Batch) -> Result<Scores, PredictError> {
        self.0.predict(batch)
    }

    fn describe(&self) -> Description {
        Description { model: "others".to_owned(), ..self.0.describe() }
    }

    fn ready(&self) -> bool {
        true
    }
}

fn connection() -> Arc<ConnectionState> {
    Arc::new(ConnectionState::new(1000))
}

/// Takes what can be had. Returns it, and why there is no more.
fn all<T>(mut next: impl FnMut() -> Result<T, Status>) -> (Vec<T>, String) {
    let mut taken = Vec::new();
    loop {
        match next() {
            Ok(more) => taken.push(more),
            Err(status) => return (taken, status.message().to_owned()),
        }
        assert!(taken.len() < 1000);
    }
}

#[test]
fn calls_that_learn_leave_half_of_the_places_to_those_that_are_scored() {
    let bound = Bound::new(10, 1 << 30);
    let (learning, text) = all(|| bound.admit(&connection(), CallKind::Learn));
    assert_eq!(learning.len(), 5);
    assert_eq!(
        text,
        "calls in flight: limit 10 (server.max_requests), got 6, 6 of them to learn, which may be half"
    );
    let model = bound.state.models.get("ads").unwrap();
    model.pressure().refused(Priority::Normal);
    let (scored, text) = all(|| bound.admit(&connection(), CallKind::Use));
    assert_eq!(scored.len(), 5, "they are counted alone for the overload");
    assert_eq!(text, "calls in flight: limit 10 (server.max_requests), got 11");
    drop(learning);
    assert_eq!(all(|| bound.admit(&connection(), CallKind::Use)).0.len(), 5);
}

#[test]
fn a_call_has_a_place_and_memory_until_its_answer_and_is_in_flight_until_that_has_left() {
    let bound = Bound::new(2, 1 << 30);
    let named = all(|| {
        let charge = bound.enter(&connection(), CallKind::Use)?;
        charge.set_model("ads".to_owned());
        Ok(charge)
    });
    assert_eq!(named.0.len(), 4);
    for charge in &named.0[..2] {
        charge.add(100).unwrap();
        charge.admit(Priority::Normal).unwrap();
    }
    assert!(named.0[2].admit(Priority::Normal).is_err());
    assert_eq!(bound.state.in_flight_bytes.load(Ordering::Relaxed), 200);
    named.0[0].answered(true);
    assert_eq!(bound.state.in_flight_bytes.load(Ordering::Relaxed), 100);
    named.0[2].admit(Priority::Normal).unwrap();
    assert!(bound.enter(&connection(), CallKind::Use).is_err());
    drop(named);
    let counts = [&bound.state.in_flight, &bound.state.places, &bound.state.callers];
    assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), [0; 3]);
    assert_eq!(bound.state.in_flight_bytes.load(Ordering::Relaxed), 0);
}

#[test]
fn changes_have_places_of_their_own_and_descriptions_are_not_the_models_load() {
    let bound = Bound::new(8, 1 << 30);
    let model = bound.state.models.get("ads").unwrap();
    model.pressure().refused(Priority::Low);
    let described = bound.admit(&connection(), CallKind::Describe).unwrap();
    assert_eq!(described.model_name(), None);
    let (scored, _) = all(|| bound.admit(&connection(), CallKind::Use));
    assert_eq!(scored.len(), 7);
    // As many again wait for their messages, or for their answers to leave.
    let (waiting, _) = all(|| bound.enter(&connection(), CallKind::Use));
    assert_eq!(waiting.len(), 8);
    assert!(bound.enter(&connection(), CallKind::Describe).is_err());
    let (changes, text) = all(|| bound.admit(&connection(), CallKind::Change));
    assert_eq!(changes.len(), KEPT_FOR_CHANGES);
    assert_eq!(text, "calls in flight: limit 16 (twice server.max_requests), got 33");
}

#[test]
fn a_model_may_always_have_one_place_and_a_refusal_names_the_limit_that_was_compared() {
    let bound = Bound::new(1, 1 << 30);
    bound.state.models.add(Arc::new(Other(Fake::new()))).unwrap();
    let held = bound.admit(&connection(), CallKind::Use).unwrap();
    let (waiting, text) = all(|| bound.enter(&connection(), CallKind::Use));
    assert_eq!(waiting.len(), 1);
    assert_eq!(text, "calls in flight: limit 2 (twice server.max_requests), got 3");
    let status = waiting[0].admit(Priority::Normal).unwrap_err();
    assert_eq!(status.message(), "calls in flight: limit 1 (server.max_requests), got 2");
    drop(held);
    waiting[0].admit(Priority::Normal).unwrap();
}

#[test]
fn memory_is_held_beside_that_of_messages() {
    let bound = Bound::new(8, 1000);
    let call = bound.enter(&connection(), CallKind::Stream).unwrap();
    call.add(400).unwrap();
    let held = call.hold(500).unwrap();
    let error = call.hold(200).err().unwrap().to_string();
    assert!(error.starts_with("bytes of calls in flight: limit 1000 (server.max_inflight_bytes), got 1100"));
    drop(held);
    assert_eq!(bound.state.in_flight_bytes.load(Ordering::Relaxed), 400);
    drop(call.hold(600).unwrap());
    drop(call);
    assert_eq!(bound.state.in_flight_bytes.load(Ordering::Relaxed), 0);
}

#[test]
fn a_stream_stays_charged_with_the_buffer_of_its_largest_message_which_the_next_ones_use() {
    let bound = Bound::new(8, 1000);
    let held = || bound.state.in_flight_bytes.load(Ordering::Relaxed);
    let stream = bound.enter(&connection(), CallKind::Stream).unwrap();
    let arrives = |bytes, cost| {
        stream.add_of_message(cost).unwrap();
        stream.ended(MessageSize { bytes, cost });
    };
    arrives(10, 50);
    assert_eq!(held(), 50);
    stream.release_first();
    assert_eq!(held(), 20);
    arrives(100, 700);
    assert_eq!(held(), 700);
    stream.release_first();
    assert_eq!(held(), 200);
    // Another message of this size takes no more than the first one.
    arrives(100, 700);
    arrives(10, 50);
    assert_eq!(held(), 750);
    stream.release_first();
    assert_eq!(held(), 250);
    stream.release_first();
    assert_eq!(held(), 200);
    // What is refused takes nothing of the buffer's part.
    assert!(stream.add_of_message(1001).is_err());
    assert_eq!(held(), 200);
    stream.release_first();
    drop(stream);
    assert_eq!(held(), 0);
}

#[test]
fn a_few_connections_leave_a_part_to_a_new_one() {
    let bound = Bound::new(100, 1 << 20);
    let connections: Vec<_> = (0..24).map(|_| connection()).collect();
    for kind in [CallKind::Use, CallKind::Stream] {
        let held: Vec<_> =
            connections.iter().map(|connection| all(|| bound.enter(connection, kind))).collect();
        // The first takes the half that is for all.
        let of_each: Vec<usize> = held.iter().map(|(calls, _)| calls.len()).collect();
        assert_eq!(of_each[0], if kind == CallKind::Use { 100 } else { 50 });
        assert!(of_each[1..].iter().all(|&calls| calls == 1), "{of_each:?}");
        assert!(held[0].1.ends_with("of them of this connection; the rest is for others"), "{}", held[0].1);
        assert!(!all(|| bound.enter(&connection(), kind)).0.is_empty());
    }
    // The same holds for memory. A connection may always hold the memory of one call.
    let [call, second] = [(); 2].map(|()| bound.enter(&connections[0], CallKind::Use).unwrap());
    call.add(1_000_000).unwrap();
    let status = second.add(2000).unwrap_err();
    assert!(status.to_string().ends_with("the rest is for other connections"), "{status}");
    bound.enter(&connections[1], CallKind::Use).unwrap().add(40_000).unwrap();
    call.add(1000).unwrap();
}
