//! Every wrong input of a Predict call gets its status code, and a message that names the field and the
//! limit.

use flechette::server::proto::PredictRequest;
use tonic::Code;

use crate::serving::{Running, request};

struct Bad {
    what: &'static str,
    change: fn(&mut PredictRequest),
    code: Code,
    expected: &'static [&'static str],
}

const fn bad(
    what: &'static str,
    change: fn(&mut PredictRequest),
    code: Code,
    expected: &'static [&'static str],
) -> Bad {
    Bad { what, change, code, expected }
}

const BAD_REQUESTS: &[Bad] = &[
    bad("model", |r| r.model = "nobody".into(), Code::NotFound, &["model", "nobody"]),
    bad("no model", |r| r.model.clear(), Code::NotFound, &["model"]),
    bad("huge name", |r| r.model = "é".repeat(9000), Code::NotFound, &["model", "..."]),
    bad("version", |r| r.version = 8, Code::NotFound, &["version", "serves version 7", "got 8"]),
    bad("no samples", |r| r.samples = 0, Code::InvalidArgument, &["samples", "at least 1", "got 0"]),
    bad(
        "too many samples",
        |r| r.samples = 65,
        Code::ResourceExhausted,
        &["samples", "limit 64", "server.max_samples", "got 65"],
    ),
    bad("all samples", |r| r.samples = u32::MAX, Code::ResourceExhausted, &["limit 64", "4294967295"]),
    bad("dense width", |r| r.dense.push(1.0), Code::InvalidArgument, &["dense", "2 samples x 2", "got 5"]),
    bad("nan", |r| r.dense[3] = f32::NAN, Code::InvalidArgument, &["age", "sample 1", "finite", "NaN"]),
    bad(
        "infinity",
        |r| r.dense[0] = f32::INFINITY,
        Code::InvalidArgument,
        &["price", "sample 0", "finite", "inf"],
    ),
    bad(
        "unknown feature",
        |r| r.features[1].name = "tagg".into(),
        Code::InvalidArgument,
        &["unknown feature", "tagg"],
    ),
    bad(
        "huge feature",
        |r| r.features[1].name = "x".repeat(20_000),
        Code::InvalidArgument,
        &["unknown feature", "..."],
    ),
    bad("missing feature", |r| drop(r.features.pop()), Code::InvalidArgument, &["strict", "missing"]),
    bad(
        "duplicate feature",
        |r| r.features.push(r.features[0].clone()),
        Code::InvalidArgument,
        &["user", "more than once"],
    ),
    bad(
        "ids and strings",
        |r| r.features[0].strings = vec!["a".into()],
        Code::InvalidArgument,
        &["user", "2 ids", "1 strings"],
    ),
    bad(
        "strings without a hash",
        |r| {
            r.features[1].ids.clear();
            r.features[1].lengths = vec![1, 0];
            r.features[1].strings = vec!["a".into()];
        },
        Code::InvalidArgument,
        &["tag", "no hash"],
    ),
    bad(
        "count of lengths",
        |r| r.features[1].lengths.push(0),
        Code::InvalidArgument,
        &["tag", "lengths", "expected 2", "got 3"],
    ),
    bad(
        "sum of lengths",
        |r| r.features[1].lengths = vec![u32::MAX, u32::MAX],
        Code::InvalidArgument,
        &["tag", "lengths", "sum", "8589934590"],
    ),
    bad(
        "values without lengths",
        |r| r.features[0].ids.push(1),
        Code::InvalidArgument,
        &["user", "expected 2", "got 3"],
    ),
    bad(
        "two ids of a one-hot feature",
        |r| r.features[0].lengths = vec![2, 0],
        Code::InvalidArgument,
        &["user", "sample 0", "1 id", "got 2"],
    ),
    bad(
        "too many ids of a multi-hot feature",
        |r| {
            r.features[1].lengths = vec![0, 4];
            r.features[1].ids = vec![1, 2, 3, 4];
        },
        Code::InvalidArgument,
        &["tag", "sample 1", "at most 3", "got 4"],
    ),
    bad(
        "an id past a table whose default is error",
        |r| r.features[2].ids[1] = 10,
        Code::InvalidArgument,
        &["strict", "id 10", "10 rows"],
    ),
    bad(
        "too many bytes",
        |r| r.features[0].strings = vec![vec![b'x'; 70_000].into()],
        Code::ResourceExhausted,
        &["limit 65536 bytes", "server.max_bytes", "got 70"],
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_input_gets_its_code_and_names_field_and_limit() {
    let mut running = Running::start().await;
    for case in BAD_REQUESTS {
        let (mut message, _) = request(2, 1);
        (case.change)(&mut message);
        let status = running.client.predict(message).await.expect_err(case.what);
        assert_eq!(status.code(), case.code, "{}: {status}", case.what);
        for needle in case.expected {
            assert!(status.message().contains(needle), "{}: {needle:?} in {status}", case.what);
        }
    }
    assert_eq!(running.model.computed(), 0, "no bad request reaches the model");
    let (message, scores) = request(2, 1);
    assert_eq!(running.client.predict(message).await.unwrap().into_inner().scores, scores);
}
