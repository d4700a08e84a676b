//! Wrong requests and parameters: each gets an error that names the tensor or the parameter.

use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::model_infer_request::InferRequestedOutputTensor;
use flechette::server::inference::*;
use tonic::Code;

use super::messages::{connect, raw, right};
use crate::serving::Running;

type Change = fn(&mut ModelInferRequest);

/// The inputs of the typed request: dense, user, tag, tag:lengths, strict. It has 3 samples and 5 tags.
const WRONG: [(Change, Code, &str); 37] = [
    (|r| r.model_name = "x".into(), Code::NotFound, "model: no model \"x\" is served here"),
    (|r| r.model_version = "8".into(), Code::NotFound, "version: model \"ads\" serves version 7, got 8"),
    (|r| r.model_version = "0".into(), Code::NotFound, "version: model \"ads\" serves version 7, got 0"),
    (
        |r| r.model_version = "new".into(),
        Code::InvalidArgument,
        "model_version: expected a number, or nothing for the version that serves, got \"new\"",
    ),
    (|r| drop(r.inputs.remove(0)), Code::InvalidArgument, "input \"dense\": missing"),
    (|r| drop(r.inputs.remove(1)), Code::InvalidArgument, "input \"user\": missing"),
    (|r| drop(r.inputs.remove(3)), Code::InvalidArgument, "input \"tag:lengths\": missing"),
    (|r| r.inputs.clear(), Code::InvalidArgument, "input \"dense\": missing"),
    (
        |r| r.inputs[4].name = "tags".into(),
        Code::InvalidArgument,
        "input \"tags\": the model has no such input",
    ),
    (
        |r| r.inputs[3].name = "user:lengths".into(),
        Code::InvalidArgument,
        "input \"user:lengths\": the model has no such input",
    ),
    (|r| r.inputs[4].name = "user".into(), Code::InvalidArgument, "input \"user\": given more than once"),
    (
        |r| r.inputs[0].datatype = "FP64".into(),
        Code::InvalidArgument,
        "input \"dense\": datatype: expected FP32, got \"FP64\"",
    ),
    (
        |r| r.inputs[1].datatype = "INT32".into(),
        Code::InvalidArgument,
        "input \"user\": datatype: expected INT64 or BYTES, got \"INT32\"",
    ),
    (
        |r| r.inputs[3].datatype = "INT64".into(),
        Code::InvalidArgument,
        "input \"tag:lengths\": datatype: expected INT32, got \"INT64\"",
    ),
    (
        |r| r.inputs[0].shape = vec![3],
        Code::InvalidArgument,
        "input \"dense\": shape: expected [3, 2], got [3]",
    ),
    (
        |r| r.inputs[0].shape = vec![],
        Code::InvalidArgument,
        "input \"dense\": shape: expected [n, 2], got []",
    ),
    (
        |r| r.inputs[0].shape = vec![-3, 2],
        Code::InvalidArgument,
        "input \"dense\": shape: expected at least 1 sample, got -3",
    ),
    (
        |r| r.inputs[1].shape = vec![1; 20],
        Code::InvalidArgument,
        "input \"user\": shape: expected [3, 1], got [1, 1, 1, 1, 1, 1, 1, 1, ...]",
    ),
    (
        |r| r.inputs[1].shape = vec![3],
        Code::InvalidArgument,
        "input \"user\": shape: expected [3, 1], got [3]",
    ),
    (
        |r| r.inputs[2].shape = vec![5, 1],
        Code::InvalidArgument,
        "input \"tag\": shape: expected [n], got [5, 1]",
    ),
    (
        |r| r.inputs[3].shape = vec![2],
        Code::InvalidArgument,
        "input \"tag:lengths\": shape: expected [3], got [2]",
    ),
    (
        |r| r.inputs[0].shape = vec![0, 2],
        Code::InvalidArgument,
        "input \"dense\": shape: expected at least 1 sample, got 0",
    ),
    (
        |r| r.inputs[0].shape = vec![65, 2],
        Code::ResourceExhausted,
        "input \"dense\": shape: limit 64 samples (server.max_samples), got 65",
    ),
    (
        |r| r.inputs[0].shape = vec![i64::MAX, 2],
        Code::ResourceExhausted,
        "input \"dense\": shape: limit 64 samples (server.max_samples), got 9223372036854775807",
    ),
    (
        |r| contents(r, 0).fp32_contents.truncate(5),
        Code::InvalidArgument,
        "input \"dense\": contents: expected 6 elements for its shape, got 5",
    ),
    (
        |r| contents(r, 1).int64_contents.push(1),
        Code::InvalidArgument,
        "input \"user\": contents: expected 3 elements for its shape, got 4",
    ),
    (
        |r| r.inputs[2].shape = vec![i64::MAX],
        Code::InvalidArgument,
        "input \"tag\": contents: expected 9223372036854775807 elements for its shape, got 5",
    ),
    (
        |r| contents(r, 1).int_contents.push(1),
        Code::InvalidArgument,
        "input \"user\": contents: expected only int64_contents, the field of its datatype",
    ),
    (
        |r| contents(r, 1).int64_contents[2] = -4,
        Code::InvalidArgument,
        "input \"user\": element 2: expected an id of at least 0, got -4",
    ),
    (
        |r| contents(r, 3).int_contents[1] = -1,
        Code::InvalidArgument,
        "input \"tag:lengths\": element 1: expected a length of at least 0, got -1",
    ),
    (
        |r| contents(r, 3).int_contents = vec![1, 2, 1],
        Code::InvalidArgument,
        "input \"tag:lengths\": expected a sum of 5, the number of values of \"tag\", got 4",
    ),
    (
        |r| contents(r, 3).int_contents = vec![i32::MAX; 3],
        Code::InvalidArgument,
        "input \"tag:lengths\": expected a sum of 5, the number of values of \"tag\", got 6442450941",
    ),
    (
        |r| contents(r, 3).int_contents = vec![5, 0, 0],
        Code::InvalidArgument,
        "feature \"tag\", sample 0: expected at most 3 ids, got 5",
    ),
    (
        |r| contents(r, 0).fp32_contents[2] = f32::NAN,
        Code::InvalidArgument,
        "dense feature \"price\", sample 1: expected a finite number, got NaN",
    ),
    (
        |r| r.raw_input_contents = vec![Default::default(); 4],
        Code::InvalidArgument,
        "raw_input_contents: expected 5 entries, one per input, got 4",
    ),
    (
        |r| r.raw_input_contents = vec![Default::default(); 5],
        Code::InvalidArgument,
        "input \"dense\": contents: expected none, because raw_input_contents is given",
    ),
    (
        |r| {
            r.outputs = vec![InferRequestedOutputTensor {
                name: "logits".into(),
                ..InferRequestedOutputTensor::default()
            }]
        },
        Code::InvalidArgument,
        "output \"logits\": the outputs are \"score\" and \"logit\"",
    ),
];

fn contents(request: &mut ModelInferRequest, input: usize) -> &mut InferTensorContents {
    request.inputs[input].contents.as_mut().unwrap()
}

/// The wrong raw contents of an input, of 3 samples.
const WRONG_RAW: [(usize, &[u8], &str); 5] = [
    (0, &[0; 23], "input \"dense\": raw contents: expected 24 bytes for its shape, got 23"),
    (1, &[0xff; 16], "input \"user\": raw contents: expected 24 bytes for its shape, got 16"),
    (1, &[0xff; 24], "input \"user\": element 0: expected an id of at least 0, got -1"),
    (3, &[], "input \"tag:lengths\": raw contents: expected 12 bytes for its shape, got 0"),
    (3, &[0xff; 12], "input \"tag:lengths\": element 0: expected a length of at least 0, got -1"),
];

/// Wrong raw strings of `user`, of 3 samples.
const WRONG_STRINGS: [(&[u8], &str); 4] = [
    (&[], "input \"user\": contents: expected 3 elements for its shape, got 0"),
    (&[1, 0, 0, 0, b'a', 0, 0], "input \"user\": raw contents: element 1 needs 4 bytes, 2 are left"),
    (&[0xff; 4], "input \"user\": raw contents: element 0 needs 4294967295 bytes, 0 are left"),
    (&[0; 16], "input \"user\": contents: expected 3 elements for its shape, got 4"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wrong_request_gets_an_error_that_names_the_tensor() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let mut refused = async |message: ModelInferRequest| client.model_infer(message).await.unwrap_err();
    let mut invalid = 0;
    for (change, code, text) in WRONG {
        let mut message = right();
        change(&mut message);
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (code, text));
        invalid += usize::from(code == Code::InvalidArgument);
    }
    for (input, bytes, text) in WRONG_RAW {
        let mut message = raw(right());
        message.raw_input_contents[input] = bytes.into();
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text));
    }
    for (bytes, text) in WRONG_STRINGS {
        let mut message = raw(right());
        message.inputs[1].datatype = "BYTES".to_owned();
        message.raw_input_contents[1] = bytes.into();
        let status = refused(message).await;
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text));
    }
    invalid += WRONG_RAW.len() + WRONG_STRINGS.len();
    let counted = format!("flechette_requests_total{{model=\"ads\",code=\"INVALID_ARGUMENT\"}} {invalid}");
    running.until_metric(&counted).await;
    connect(&running).await.model_infer(right()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_that_would_change_the_answer_are_refused() {
    let running = Running::start().await;
    let mut client = connect(&running).await;
    let parameter = || InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(1)) };
    let mut shared = right();
    shared.inputs[1].parameters.insert("shared_memory_region".to_owned(), parameter());
    let status = client.model_infer(shared).await.unwrap_err();
    assert_eq!(status.message(), "input \"user\": shared memory is not supported");
    // Clients send raw contents of the other tensors only.
    let mut shared = raw(right());
    shared.raw_input_contents.remove(1);
    shared.inputs[1].parameters.insert("shared_memory_region".to_owned(), parameter());
    let status = client.model_infer(shared).await.unwrap_err();
    assert_eq!(status.message(), "input \"user\": shared memory is not supported");
    for name in ["classification", "shared_memory_region"] {
        let mut message = right();
        let parameters = [(name.to_owned(), parameter())].into();
        message.outputs = vec![InferRequestedOutputTensor { name: "score".to_owned(), parameters }];
        let status = client.model_infer(message).await.unwrap_err();
        assert_eq!(status.message(), format!("output \"score\": parameter {name:?} is not supported"));
    }
    for (wrong, shown) in [
        (ParameterChoice::Int64Param(-1), "-1"),
        (ParameterChoice::StringParam("5".to_owned()), "\"5\""),
        (ParameterChoice::DoubleParam(1.5), "1.5"),
    ] {
        let mut message = right();
        let wrong = InferParameter { parameter_choice: Some(wrong) };
        message.parameters.insert("timeout".to_owned(), wrong);
        let status = client.model_infer(message).await.unwrap_err();
        let text = format!("parameters: timeout: expected microseconds, a whole number from 0, got {shown}");
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, text.as_str()));
    }
    let mut unknown = right();
    unknown.parameters.insert("sequence_id".to_owned(), parameter());
    client.model_infer(unknown).await.unwrap();
}
