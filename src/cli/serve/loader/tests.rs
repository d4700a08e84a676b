use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::*;
use crate::cli::serve::Serving;
use crate::config::Flags;
use crate::engine::tests::{World, Writer, occupy_threads};
use crate::predict::Predict;
use crate::types::Batch;

#[test]
fn a_model_whose_threads_are_all_busy_leaves_those_of_another_one_free() {
    let mut world = World::new(Writer::Everything);
    world.publish();
    world.copy_version("1", "other");
    let flags = Flags { device: Some("host".into()), ..Flags::default() };
    let config = Config::resolve(&flags, [], Some("threads.compute = 2")).unwrap();
    let serving = Serving::load(&config, world.models()).unwrap();
    let [busy, other] = &serving.engines()[..] else { panic!("two models") };

    let mut batch = Batch::empty(2);
    (0..8).for_each(|seed| batch.append(&busy.generate_batch(seed)));
    let predict = |engine: &Arc<Engine>| {
        let (engine, batch, (end, ended)) = (engine.clone(), batch.clone(), mpsc::channel());
        std::thread::spawn(move || end.send(engine.predict(&batch).map(|scores| scores.probabilities)));
        ended
    };
    let free = occupy_threads(busy);
    let scores = predict(other).recv_timeout(Duration::from_secs(60)).expect("its own threads").unwrap();
    let waits = predict(busy);
    assert_eq!(waits.recv_timeout(Duration::from_millis(100)).unwrap_err(), RecvTimeoutError::Timeout);
    drop(free);
    assert_eq!(waits.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), scores);
}
