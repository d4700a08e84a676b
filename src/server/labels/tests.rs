use std::future::poll_fn;
use std::sync::Condvar;
use std::sync::mpsc::{self, Receiver, Sender};
use std::task::Poll;

use tokio::runtime::Runtime;

use super::*;
use crate::pace::ClientWaits;
use crate::server::Server;
use crate::server::fuzz::parts_of;
use crate::server::traffic::Labels;

const NAME: &str = "ads";

/// The longest wait of a test.
const FOREVER: Duration = Duration::from_secs(60);

/// A change that was requested.
struct Asked {
    begun: oneshot::Sender<()>,
    reply: oneshot::Sender<Result<Made, ChangeError>>,
}

/// A repository that hands its changes to the test, and whose disk does not answer while it is stuck.
struct Changes {
    requested: Sender<Asked>,
    stuck: Mutex<bool>,
    freed: Condvar,
    /// The labels of each write that has begun.
    kept: Mutex<Vec<BTreeMap<String, VersionSelector>>>,
    looks: Sender<()>,
}

impl Repository for Changes {
    fn names(&self) -> Result<Vec<String>, String> {
        Ok(vec![NAME.to_owned()])
    }

    fn keep_labels(&self, _: &str, set: &BTreeMap<String, VersionSelector>) -> Result<(), String> {
        self.kept.lock().unwrap().push(set.clone());
        let stuck = self.stuck.lock().unwrap();
        let (_freed, timeout) = self.freed.wait_timeout_while(stuck, FOREVER, |stuck| *stuck).unwrap();
        assert!(!timeout.timed_out(), "nobody waits this long");
        Ok(())
    }

    fn look(&self, _: &str) {
        let _ = self.looks.send(());
    }

    fn change(&self, _: Change, _: String, _: String) -> Requested {
        let ((begins, begun), (reply, answer)) = (oneshot::channel(), oneshot::channel());
        self.requested.send(Asked { begun: begins, reply }).unwrap();
        Requested { begun, answer, waits: ClientWaits::begin() }
    }

    fn changes_now(&self) -> Option<String> {
        None
    }
}

impl Changes {
    fn set_stuck(&self, stuck: bool) {
        *self.stuck.lock().unwrap() = stuck;
        self.freed.notify_all();
    }

    fn kept(&self) -> Vec<BTreeMap<String, VersionSelector>> {
        self.kept.lock().unwrap().clone()
    }
}

fn request(label: &str, version: u64) -> SetLabelRequest {
    SetLabelRequest { model: NAME.to_owned(), label: label.to_owned(), version, remove: false }
}

/// A server of version 7 of a model.
struct World {
    runtime: Runtime,
    state: Arc<ServerState>,
    repository: Arc<Changes>,
    requested: Receiver<Asked>,
    looks: Receiver<()>,
}

/// A call that sets a label.
type Call = tokio::task::JoinHandle<Result<Changed, CallError>>;

impl World {
    fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let settings = "[server]\ngrpc = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n";
        let server = runtime.block_on(Server::bind(parts_of(settings))).unwrap();
        let state = server.state.clone();
        state.models.set_labels(NAME, Labels::default());
        let ((requests, requested), (look, looks)) = (mpsc::channel(), mpsc::channel());
        let (kept, freed) = (Mutex::default(), Condvar::new());
        let repository =
            Arc::new(Changes { requested: requests, stuck: Mutex::new(false), freed, kept, looks: look });
        assert!(state.repository.set(repository.clone()).is_ok());
        Self { runtime, state, repository, requested, looks }
    }

    /// A call that sets a label to a version.
    /// A world whose disk does not answer, and the call whose label it has begun to write.
    fn with_a_write_that_hangs() -> (Self, Call) {
        let world = Self::new();
        world.repository.set_stuck(true);
        let first = world.set("l0", 7);
        world.wait("the first write begins", |world| world.repository.kept().len() == 1);
        (world, first)
    }

    fn set(&self, label: &str, version: u64) -> Call {
        let (state, request) = (self.state.clone(), request(label, version));
        self.runtime.spawn(async move { set(&state, request, "id").await })
    }

    /// A call that sets a label to a version that is not loaded, and the answer that it waits for: the
    /// repository has begun.
    fn set_by_repository(
        &self,
        label: &str,
        version: u64,
    ) -> (Call, oneshot::Sender<Result<Made, ChangeError>>) {
        let call = self.set(label, version);
        let Asked { begun, reply } = self.requested.recv_timeout(FOREVER).unwrap();
        begun.send(()).unwrap();
        (call, reply)
    }

    /// What the repository does in its own time: it sets a label to the loaded version.
    fn set_in_memory(&self, label: &str) {
        let target = Some(VersionSelector::Version(Version(7)));
        self.state.models.set_label(NAME, LabelChange { label, target }).unwrap();
    }

    fn end<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { tokio::time::timeout(FOREVER, call).await.unwrap() })
    }

    /// Waits until something has happened. Panics if it never does.
    fn wait(&self, what: &str, happened: impl Fn(&Self) -> bool) {
        self.end(async {
            while !happened(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        assert!(happened(self), "{what}");
    }
}

#[test]
fn a_label_of_a_call_that_is_cancelled_meanwhile_is_kept() {
    let world = World::new();
    let (call, reply) = world.set_by_repository("old", 3);
    call.abort();
    assert!(world.end(call).is_err_and(|error| error.is_cancelled()));
    world.set_in_memory("old");
    reply.send(Ok(Made::InMemory)).unwrap();
    world.looks.recv_timeout(FOREVER).unwrap();
    let kept = world.repository.kept();
    assert!(kept.len() == 1 && kept[0].contains_key("old"), "{kept:?}");
}

#[test]
fn a_change_that_has_not_begun_when_its_call_is_cancelled_is_not_made() {
    let world = World::new();
    let call = world.set("old", 3);
    let Asked { begun, reply } = world.requested.recv_timeout(FOREVER).unwrap();
    call.abort();
    assert!(world.end(call).is_err_and(|error| error.is_cancelled()));
    assert!(begun.send(()).is_err(), "the repository sees that nobody waits");
    drop(reply);
    assert!(world.repository.kept().is_empty());
}

#[test]
fn calls_that_set_labels_on_a_disk_that_hangs_share_the_write_that_waits() {
    let (world, first) = World::with_a_write_that_hangs();
    let state = world.state.clone();
    let mut calls: Vec<_> =
        (0..100).map(|call| Box::pin(set(&state, request(&format!("l{}", call % 10), 7), "id"))).collect();
    world.end(async {
        for call in &mut calls {
            let waits = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_pending()));
            assert!(waits.await, "it waits for the disk");
        }
    });
    world.repository.set_stuck(false);
    for call in calls {
        let Changed { version, not_kept, .. } = world.end(call).unwrap();
        assert_eq!((version, not_kept), (Some(Version(7)), None));
    }
    assert_eq!(world.end(first).unwrap().unwrap().not_kept, None);
    let kept = world.repository.kept();
    assert_eq!(kept.iter().map(BTreeMap::len).collect::<Vec<_>>(), [1, 10]);
    assert!(world.state.models.keeping.waiting().is_empty());
}

#[test]
fn a_label_of_a_model_that_is_unloaded_before_the_write_is_not_reported_as_kept() {
    let (world, first) = World::with_a_write_that_hangs();
    let call = world.set("l1", 7);
    world.wait("the second write waits", |world| world.state.models.keeping.waiting().len() == 1);
    assert!(world.state.models.remove(NAME));
    world.repository.set_stuck(false);
    assert_eq!(world.end(first).unwrap().unwrap().not_kept, None);
    let not_kept = world.end(call).unwrap().unwrap().not_kept;
    assert_eq!(not_kept.as_deref(), Some("the model was unloaded meanwhile"));
}

#[test]
fn a_label_that_is_set_in_memory_just_before_the_model_is_unloaded_is_not_reported_as_kept() {
    let world = World::new();
    let (call, reply) = world.set_by_repository("old", 3);
    world.set_in_memory("old");
    assert!(world.state.models.remove(NAME));
    reply.send(Ok(Made::InMemory)).unwrap();
    let not_kept = world.end(call).unwrap().unwrap().not_kept;
    assert_eq!(not_kept.as_deref(), Some("the model was unloaded meanwhile"));
}

#[test]
fn a_label_that_is_written_because_the_model_is_unloaded_already_is_kept() {
    let world = World::new();
    let (call, reply) = world.set_by_repository("old", 3);
    assert!(world.state.models.remove(NAME));
    reply.send(Ok(Made::Whole)).unwrap();
    assert_eq!(world.end(call).unwrap().unwrap().not_kept, None);
}
