//! What a server says of itself: its models, its services by reflection, and its metrics.

use flechette::server::proto::{GetModelRequest, PredictRequest};
use tonic::Code;

use crate::serving::{Running, channel, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn get_model_describes_inputs_limits_and_version() {
    let mut running = Running::start().await;
    let model = running.client.get_model(GetModelRequest { model: "ads".to_owned() }).await.unwrap();
    let model = model.into_inner();
    assert_eq!((model.version, model.architecture.as_str()), (7, "dlrm"));
    assert_eq!(model.dense.iter().map(|d| d.transform.as_str()).collect::<Vec<_>>(), ["none", "log1p"]);
    let tag = &model.features[1];
    assert_eq!((tag.name.as_str(), tag.table.as_str(), tag.rows, tag.dim), ("tag", "tags", 50, 4));
    assert_eq!((tag.max_ids, tag.one_hot, tag.takes_strings), (3, false, false));
    assert!(model.features[0].one_hot && model.features[0].takes_strings);
    let limits = model.limits.unwrap();
    assert_eq!((limits.max_samples, limits.max_bytes), (64, 65_536));
    let status = running.client.get_model(GetModelRequest { model: "x".to_owned() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_services_and_describes_the_messages() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let running = Running::start().await;
    let mut client = ServerReflectionClient::new(channel(running.grpc).await);
    let mut ask = async |question| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let stream = tokio_stream::once(request);
        let mut answers = client.server_reflection_info(stream).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("not a list")
    };
    let names: Vec<_> = list.service.iter().map(|s| s.name.as_str()).collect();
    for name in ["flechette.v1.Ctr", "inference.GRPCInferenceService", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let symbol = MessageRequest::FileContainingSymbol("flechette.v1.PredictRequest".to_owned());
    let MessageResponse::FileDescriptorResponse(files) = ask(symbol).await else { panic!("not a file") };
    let text = String::from_utf8_lossy(&files.file_descriptor_proto[0]).into_owned();
    assert!(text.contains("FeatureColumn") && text.contains("dense"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_older_reflection_service_is_available() {
    use tonic_reflection::pb::v1alpha::ServerReflectionRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1alpha::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1alpha::server_reflection_response::MessageResponse;

    let running = Running::start().await;
    let mut client = ServerReflectionClient::new(channel(running.grpc).await);
    let list = MessageRequest::ListServices(String::new());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = answer else { panic!("not a list") };
    assert!(list.service.iter().any(|s| s.name == "flechette.v1.Ctr"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_requests_samples_and_errors() {
    let mut running = Running::start().await;
    for seed in 0..3 {
        running.client.predict(request(2, seed).0).await.unwrap();
    }
    running.client.predict(PredictRequest::default()).await.unwrap_err();
    let (mut wrong, _) = request(1, 1);
    wrong.samples = 0;
    running.client.predict(wrong).await.unwrap_err();
    let (mut large, _) = request(1, 1);
    large.features[0].strings = vec![vec![0; 70_000].into()];
    running.client.predict(large).await.unwrap_err();
    for line in [
        "flechette_requests_total{model=\"ads\",code=\"OK\"} 3",
        "flechette_requests_total{model=\"ads\",code=\"INVALID_ARGUMENT\"} 1",
        "flechette_requests_total{model=\"(none)\",code=\"NOT_FOUND\"} 1",
        "flechette_requests_total{model=\"(none)\",code=\"RESOURCE_EXHAUSTED\"} 1",
        "flechette_request_seconds_count{model=\"ads\"} 4",
        "flechette_queue_seconds_count{model=\"ads\"} 3",
        "flechette_batch_samples_sum{model=\"ads\"} 6",
        "flechette_queue_samples{model=\"ads\"} 0",
        "flechette_serving_version{model=\"ads\"} 7",
        "flechette_absent_ids_total{model=\"ads\",table=\"users\"} 0",
    ] {
        running.until_metric(line).await;
    }
    let (code, page) = running.get("/").await;
    assert_eq!(code, 200);
    assert!(page.starts_with("<!doctype html>"), "{page}");
    let status: serde_json::Value = serde_json::from_str(&running.get("/status.json").await.1).unwrap();
    assert_eq!(status["models"][0]["name"], "ads");
    assert_eq!(status["grpc"], running.grpc.to_string());
    assert_eq!(running.get("/nowhere").await.0, 404);
}
