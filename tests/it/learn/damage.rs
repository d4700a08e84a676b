//! Logs that cannot be opened, are damaged or have lost their end: models are served all the same, and no
//! sample is trained twice.

use std::fs;
use std::path::Path;

use flechette::server::proto::LearnRequest;
use flechette::server::proto::ctr_client::CtrClient;
use tonic::Code;

use super::sending::{send_file, wait_for_samples, workshop};
use super::served::log_of;
use crate::program::{LAST_VERSION, Served, Workshop};
use crate::serving::channel;
use crate::switching::wait;

#[test]
fn a_log_that_cannot_be_opened_keeps_no_model_from_being_served_and_is_tried_again() {
    let (workshop, _, settings) = workshop(100);
    let models = Path::new(&workshop.models);
    let log = log_of(models, "log");
    fs::create_dir_all(&log).unwrap();
    let lock = fs::File::create(log.join("lock")).unwrap();
    lock.lock().unwrap();
    let served = Served::start(&workshop.models, &settings);
    assert_eq!(served.score("log", &workshop.valid, "")["version"], 1);
    let line = "no learned samples: model log: ";
    let (code, text) = served.get("/readyz");
    assert!(code == 200 && text.contains(line), "{text}");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let learn = || {
        let labels = vec![1.0];
        let message = LearnRequest { model: "log".to_owned(), samples: 1, labels, ..LearnRequest::default() };
        runtime.block_on(async { CtrClient::new(channel(served.grpc).await).learn(message).await })
    };
    let status = learn().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("another process writes this log"), "{status}");
    assert_eq!(served.metric("flechette_learn_refused_total", &["model=\"log\""]), 1.0);
    let status = served.status();
    let model = status["models"].as_array().unwrap().iter().find(|model| model["name"] == "log");
    let reason = &model.unwrap()["no_learning"];
    assert!(reason.as_str().unwrap().contains("another process writes this log"), "{reason}");
    drop(lock);
    wait("the log is open", || !served.get("/readyz").1.contains(line));
    // Now the message is checked.
    assert_eq!(learn().unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn a_damaged_log_fails_the_training_in_a_server_and_not_the_server() {
    let (workshop, schema, settings) = workshop(100);
    let Workshop { models, train, .. } = &workshop;
    let served = Served::start(models, &settings);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 100);
    drop(served);
    let segment = log_of(Path::new(models), "log").join("0000000001.fllearn");
    let mut bytes = fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let served = Served::start(models, "--train log=learn --batch 32");
    assert_eq!(served.score("log", &workshop.valid, "")["version"], 1);
    wait("the training has failed", || served.metric("flechette_training_state", &["model=\"log\""]) == -1.0);
    assert!(served.get("/readyz").1.contains("no learned samples: model log: "));
    served.terminate();
    let (ended, log) = served.ended();
    assert!(ended.code() == Some(1) && log.contains("0000000001.fllearn: damaged"), "{log}");
}

#[test]
fn a_log_whose_end_was_forgotten_by_a_power_failure_is_not_trained_again() {
    let (workshop, schema, _) = workshop(400);
    let Workshop { models, train, valid, .. } = &workshop;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let flags = &format!("--train log=learn --batch 32 --publish-every 200ms {LAST_VERSION}");
    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    // It is never synced, so a power failure leaves an old one.
    let durable = log_of(Path::new(models), "log").join("durable");
    let old = fs::read(&durable).unwrap();
    assert_eq!(runtime.block_on(send_file(&served, &schema, train)), 400);
    // 200 samples were trained before.
    wait_for_samples(models, 200 + 600 / 32 * 32);
    drop(served);
    assert_ne!(fs::read(&durable).unwrap(), old);
    fs::write(&durable, old).unwrap();

    let served = Served::start(models, flags);
    assert_eq!(runtime.block_on(send_file(&served, &schema, valid)), 200);
    wait_for_samples(models, 200 + 800);
    served.terminate();
    let (ended, said) = served.ended();
    assert!(ended.success() && !said.contains("training begins at the first sample"), "{said}");
    wait_for_samples(models, 200 + 800);
}
