//! Inference: typed and raw tensors in any order get the scores of the native service, and the outputs that
//! they name.

use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::model_infer_request::InferRequestedOutputTensor;
use flechette::server::inference::*;
use flechette::server::proto::PredictRequest;

use super::messages::{connect, outputs, raw, scores, typed};
use crate::fake::logit;
use crate::serving::{Running, request};

/// A request whose feature `user` has strings.
fn with_strings(samples: usize, seed: u64) -> PredictRequest {
    let (mut request, _) = request(samples, seed);
    let user = &mut request.features[0];
    user.strings = user.ids.drain(..).map(|id| format!("user {id}").into_bytes().into()).collect();
    user.strings[0] = Default::default();
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typed_and_raw_tensors_get_the_native_scores() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    for seed in 0..20 {
        let samples = 1 + seed as usize % 5;
        for native in [request(samples, seed).0, with_strings(samples, seed)] {
            let expected = running.send(native.clone()).await.unwrap().unwrap();
            let mut typed = typed(&native);
            typed.id = format!("request {seed}");
            for (message, is_raw) in [(typed.clone(), false), (raw(typed), true)] {
                let response = client.model_infer(message).await.unwrap().into_inner();
                assert_eq!(scores(&response), expected);
                assert_eq!(response.raw_output_contents.len(), usize::from(is_raw));
                assert_eq!(response.id, format!("request {seed}"));
                assert_eq!((response.model_name.as_str(), response.model_version.as_str()), ("ads", "7"));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_may_have_any_order_and_a_multi_hot_feature_as_many_values_for_each_sample() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (mut native, _) = request(3, 5);
    native.features[1].lengths = vec![2; 3];
    native.features[1].ids = vec![1, 2, 3, 4, 5, 6];
    let expected = running.send(native.clone()).await.unwrap().unwrap();
    let mut message = typed(&native);
    message.inputs.reverse();
    message.outputs = vec![InferRequestedOutputTensor {
        name: "score".to_owned(),
        ..InferRequestedOutputTensor::default()
    }];
    message.model_version = "7".to_owned();
    let response = client.model_infer(raw(message.clone())).await.unwrap().into_inner();
    assert_eq!(scores(&response), expected);
    message.inputs.retain(|input| input.name != "tag:lengths");
    message.inputs.iter_mut().find(|input| input.name == "tag").unwrap().shape = vec![3, 2];
    for message in [message.clone(), raw(message.clone())] {
        let response = client.model_infer(message).await.unwrap().into_inner();
        assert_eq!(scores(&response), expected);
    }
    message.inputs.iter_mut().find(|input| input.name == "tag").unwrap().shape = vec![3, 0];
    let tag = message.inputs.iter_mut().find(|input| input.name == "tag").unwrap();
    tag.contents = None;
    let none = client.model_infer(message).await.unwrap().into_inner();
    native.features[1].lengths = vec![0; 3];
    native.features[1].ids.clear();
    assert_eq!(scores(&none), running.send(native).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_ids_are_counted_in_the_response() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (mut native, _) = request(2, 1);
    native.features[0].ids = vec![1000, 5000];
    let response = client.model_infer(typed(&native)).await.unwrap().into_inner();
    let count = |name: &str| response.parameters.get(name).and_then(|p| p.parameter_choice.clone());
    assert_eq!(count("absent_ids:user"), Some(ParameterChoice::Int64Param(2)));
    assert_eq!(count("absent_ids:tag"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_outputs_that_a_request_names_are_returned() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let (native, expected) = request(3, 5);
    let logits: Vec<f32> = expected.iter().map(|score| logit(*score)).collect();
    for (named, values) in [
        (&["score"][..], vec![&expected]),
        (&["logit"], vec![&logits]),
        (&["logit", "score", "logit"], vec![&expected, &logits]),
    ] {
        let output = |name: &&str| InferRequestedOutputTensor {
            name: (*name).to_owned(),
            ..InferRequestedOutputTensor::default()
        };
        let message = ModelInferRequest { outputs: named.iter().map(output).collect(), ..typed(&native) };
        for message in [message.clone(), raw(message)] {
            let response = client.model_infer(message).await.unwrap().into_inner();
            assert!(response.outputs.iter().all(|output| output.shape == [3, 1]));
            assert_eq!(outputs(&response).iter().collect::<Vec<_>>(), values, "{named:?}");
        }
    }
}
