//! What a server says of itself and its models: readiness, metadata, statistics and the index of the
//! repository.

use std::sync::atomic::Ordering;
use std::time::Duration;

use flechette::server::inference::*;
use tonic::Code;

use super::messages::{connect, named, right};
use crate::fake::until;
use crate::serving::{Running, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_and_its_model_describe_themselves() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let mut ready = async |request: ModelReadyRequest| {
        client.model_ready(request).await.map(|answer| answer.into_inner().ready).map_err(|s| s.code())
    };
    assert_eq!(ready(named("ads")).await, Ok(true));
    assert_eq!(ready(named("nobody")).await, Ok(false));
    assert_eq!(ready(ModelReadyRequest { version: "7".into(), ..named("ads") }).await, Ok(true));
    assert_eq!(ready(ModelReadyRequest { version: "8".into(), ..named("ads") }).await, Ok(false));
    let text = ModelReadyRequest { version: "x".into(), ..named("ads") };
    assert_eq!(ready(text).await, Err(Code::InvalidArgument));
    running.model.ready.store(false, Ordering::SeqCst);
    assert_eq!(ready(named("ads")).await, Ok(false));
    assert!(!client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);

    let server = client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!((server.name.as_str(), server.version.as_str()), ("flechette", env!("CARGO_PKG_VERSION")));
    assert_eq!(server.extensions, ["model_repository", "statistics"]);
    let metadata = ModelMetadataRequest { name: "ads".into(), version: String::new() };
    let model = client.model_metadata(metadata).await.unwrap().into_inner();
    assert_eq!((model.platform.as_str(), &model.versions[..]), ("flechette_dlrm", &["7".to_owned()][..]));
    let tensors = |tensors: &[model_metadata_response::TensorMetadata]| -> Vec<String> {
        tensors.iter().map(|t| format!("{} {} {:?}", t.name, t.datatype, t.shape)).collect()
    };
    let inputs = [
        "dense FP32 [-1, 2]",
        "user BYTES [-1, 1]",
        "tag INT64 [-1]",
        "tag:lengths INT32 [-1]",
        "strict BYTES [-1, 1]",
    ];
    assert_eq!(tensors(&model.inputs), inputs);
    assert_eq!(tensors(&model.outputs), ["score FP32 [-1, 1]", "logit FP32 [-1, 1]"]);
    let other = ModelMetadataRequest { name: "ads".into(), version: "8".into() };
    assert_eq!(client.model_metadata(other).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_is_stuck_is_unavailable_in_the_index() {
    let running = Running::start_with(|parts| {
        parts.batchers.common.default_deadline = Duration::from_millis(20);
    })
    .await;
    let row = async |ready| {
        let request = RepositoryIndexRequest { ready, ..Default::default() };
        let index = connect(&running).await.repository_index(request).await.unwrap().into_inner();
        index.models.into_iter().map(|row| (row.version, row.state, row.reason)).collect::<Vec<_>>()
    };
    let words = |state: &str, reason: &str| [("7".to_owned(), state.to_owned(), reason.to_owned())];
    assert_eq!(row(true).await, words("READY", ""));
    running.model.hold();
    let stuck = running.send(request(1, 1).0);
    let unavailable = words("UNAVAILABLE", "stuck: a call of the version does not end");
    until(async || row(false).await == unavailable).await;
    assert_eq!(row(true).await, []);
    running.model.release();
    until(async || row(true).await == words("READY", "")).await;
    drop(stuck.await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_count_requests_samples_and_batches_of_both_protocols() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    for _ in 0..3 {
        client.model_infer(right()).await.unwrap();
    }
    running.send(request(5, 1).0).await.unwrap().unwrap();
    let mut wrong = right();
    wrong.inputs.clear();
    client.model_infer(wrong).await.unwrap_err();
    for name in ["", "ads"] {
        let asked = ModelStatisticsRequest { name: name.to_owned(), version: String::new() };
        let answer = client.model_statistics(asked).await.unwrap().into_inner();
        let [ads] = &answer.model_stats[..] else { panic!("{answer:?}") };
        assert_eq!((ads.name.as_str(), ads.version.as_str()), ("ads", "7"));
        assert_eq!((ads.inference_count, ads.execution_count), (3 * 3 + 5, 4));
        assert!(ads.last_inference > 1_600_000_000_000, "{ads:?}");
        let stats = ads.inference_stats.unwrap();
        let counts = [stats.success, stats.fail, stats.queue, stats.compute_input, stats.compute_infer];
        assert_eq!(counts.map(|total| total.unwrap().count), [4, 1, 4, 4, 4]);
        let [success, parts @ ..] =
            [stats.success, stats.queue, stats.compute_input, stats.compute_infer].map(|t| t.unwrap().ns);
        assert!(parts.iter().all(|part| *part > 0) && parts.iter().sum::<u64>() <= success, "{stats:?}");
    }
    let unknown = ModelStatisticsRequest { name: "x".to_owned(), version: String::new() };
    assert_eq!(client.model_statistics(unknown).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_repository_lists_its_models_and_changes_none() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let index = client.repository_index(RepositoryIndexRequest::default()).await.unwrap().into_inner();
    let [ads] = &index.models[..] else { panic!("{index:?}") };
    assert_eq!((ads.name.as_str(), ads.version.as_str(), ads.state.as_str()), ("ads", "7", "READY"));
    let named = RepositoryIndexRequest { repository_name: "other".to_owned(), ready: false };
    let status = client.repository_index(named).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("got \"other\""), "{status}");
    let load = RepositoryModelLoadRequest { model_name: "ads".to_owned(), ..Default::default() };
    assert_eq!(client.repository_model_load(load).await.unwrap_err().code(), Code::Unimplemented);
}
