//! Request messages, from the wire to a batch.

use super::*;
use crate::fake::Fake;
use crate::fuzz::bytes::{self, Input};
use crate::fuzz::memory::measured;
use crate::fuzz::{run, wire};
use crate::server::convert::Inputs;
use crate::server::convert::tests::check_same as columns_are_same;
use crate::server::ctr::{LearnMessage, PredictMessage};
use crate::server::inference::*;
use crate::server::kserve::request::tests::check_same as tensors_are_same;
use crate::server::kserve::tensors::EncodedInputs;
use crate::server::kserve::{InferRequest, answers};
use crate::server::pending::ScoreRequest;
use crate::server::proto::{GetModelRequest, LearnRequest, SetLabelRequest};
use crate::server::received::Receive;
use crate::server::status::CallError;
use crate::types::Batch;

/// What a message may take beside its cost: the counter of the slices of its bytes.
const SLACK: usize = 64;

/// What an error of the decoder takes.
const ERROR: usize = 1024;

const WORDS: &[&str] = &[
    "user",
    "tag",
    "strict",
    "dense",
    "tag:lengths",
    "INT64",
    "INT32",
    "FP32",
    "BYTES",
    "ads",
    "score",
    "logit",
    "timeout",
    "priority",
    "shared_memory_region",
    "",
    "\u{e9}\u{1}",
];

const CTR_NESTED: &[&[u64]] = &[&[5]];
const KSERVE_NESTED: &[&[u64]] = &[&[4], &[4, 2], &[5], &[5, 4], &[5, 4, 2], &[5, 5], &[6], &[6, 2]];

fn inputs() -> Inputs {
    Inputs::new(Fake::new().schema.clone(), 4096)
}

/// Measures a message and receives it as the server does, and checks that it costs what it takes.
fn both<R: Receive>(layout: &'static Layout, message: &[u8]) -> (Option<R>, Result<usize, Fault>) {
    let frame = framed(message);
    let cost = cost_by(layout, &frame, frame.len());
    assert_eq!(cost_by(layout, &frame, 1 + message.len() % 50), cost, "in pieces and whole");
    let body = Bytes::from(message.to_vec());
    let (received, memory) = measured(|| R::receive(body).ok());
    if let Ok(cost) = cost {
        // The decoder copies a text that ends after its entry of a map before it refuses it.
        let slack = if received.is_some() { SLACK } else { ERROR + message.len() };
        let name = std::any::type_name::<R>();
        assert!(memory + message.len() <= cost + slack, "{name}: {memory} for {cost}");
    }
    (received, cost)
}

/// The message and its cost. The meter refuses no message that generated code (`M`) decodes, except for its
/// size and for two forms that no client sends.
fn received<R: Receive, M: Message + Default>(layout: &'static Layout, message: &[u8]) -> Option<(R, usize)> {
    let (received, cost) = both::<R>(layout, message);
    if let Err(fault) = cost
        && M::decode(message).is_ok()
    {
        let lenient = [
            Fault::Malformed("a group, which the protocol does not use"),
            Fault::Malformed("an entry of a map that is not a message"),
        ];
        assert!(lenient.contains(&fault) || matches!(fault, Fault::TooMany(_)), "{fault}");
    }
    Some((received?, cost.ok()?))
}

/// Converts a request to a batch, and checks the batch.
fn converted<E: Into<CallError>>(
    (message, cost): (usize, usize),
    convert: impl FnOnce(&mut Batch) -> Result<(), E>,
) -> Option<Batch> {
    let mut batch = Batch::default();
    let (converted, memory) = measured(|| convert(&mut batch));
    // The raw batch and the batch, in vectors that grow by doubling.
    assert!(memory <= 4 * cost + (1 << 16), "{memory} for {cost}");
    if let Err(error) = converted {
        let (status, memory) = measured(|| Status::from(error.into()));
        assert!(memory <= cost + (1 << 14) && status.message().len() <= 1100, "{status:?}");
        return None;
    }
    assert!(batch.samples > 0 && batch.dense.len() == 2 * batch.samples);
    assert!(batch.dense.iter().all(|value| value.is_finite()));
    for column in &batch.features {
        assert_eq!((column.offsets.len(), column.offsets[0]), (batch.samples + 1, 0));
        assert!(column.offsets.is_sorted() && column.offsets[batch.samples] as usize == column.ids.len());
    }
    // What `batcher.queue_bytes` assumes of a batch.
    let ids = batch.features.iter().map(|column| 8 * column.ids.len() + 4 * column.offsets.len());
    assert!(4 * batch.dense.len() + ids.sum::<usize>() <= 12 * message + 64);
    Some(batch)
}

fn columns(samples: usize, text: bool) -> Vec<FeatureColumn> {
    let strings = || (0..samples).map(|n| Bytes::from(format!("{n}"))).collect::<Vec<_>>();
    let ids = |most: u64| (0..samples as u64).map(|n| n % most).collect::<Vec<_>>();
    let (user, strict) = if text { (vec![], vec![]) } else { (ids(1000), ids(10)) };
    let strings = || if text { strings() } else { Vec::new() };
    let lengths: Vec<u32> = (0..samples as u32).map(|n| n % 4).collect();
    let tags = (0..lengths.iter().sum::<u32>()).map(|n| u64::from(n) * 3).collect();
    let column =
        |name: &str, lengths, ids, strings| FeatureColumn { name: name.to_owned(), lengths, ids, strings };
    vec![
        column("user", vec![], user, strings()),
        column("tag", lengths, tags, vec![]),
        column("strict", vec![], strict, strings()),
    ]
}

pub(crate) fn predict_requests() -> Vec<PredictRequest> {
    let request = |samples: usize, text| PredictRequest {
        model: "ads".to_owned(),
        version: 7,
        samples: samples as u32,
        dense: (0..2 * samples).map(|n| n as f32 / 3.0).collect(),
        features: columns(samples, text),
        timeout_ms: 100,
        priority: 1,
        logits: true,
        ..PredictRequest::default()
    };
    vec![request(1, false), request(3, true), request(40, false), request(200, true)]
}

fn encoded<M: Message>(messages: &[M]) -> Vec<Vec<u8>> {
    messages.iter().map(Message::encode_to_vec).collect()
}

#[test]
fn predict() {
    let inputs = inputs();
    run(wire::mutated(encoded(&predict_requests()), CTR_NESTED, WORDS), |Input(message)| {
        columns_are_same(&message);
        let received = received::<PredictMessage, PredictRequest>(&CTR, &message);
        let Some((request, cost)) = received else { return false };
        let _ = (request.timeout(), request.priority());
        converted((message.len(), cost), |batch| inputs.encode(&request, batch)).is_some()
    });
}

#[test]
fn learn() {
    let inputs = inputs();
    let request = |of: PredictRequest| {
        let labels = (0..of.samples).map(|n| n as f32 % 2.0).collect();
        let PredictRequest { model, samples, dense, features, .. } = of;
        LearnRequest { model, samples, dense, features, labels, dense_order: 0 }
    };
    let seeds: Vec<_> = predict_requests().into_iter().map(request).collect();
    run(wire::mutated(encoded(&seeds), CTR_NESTED, WORDS), |Input(message)| {
        columns_are_same(&message);
        let received = received::<LearnMessage, LearnRequest>(&CTR, &message);
        let Some((request, cost)) = received else { return false };
        converted((message.len(), cost), |batch| {
            let samples = request.head.samples;
            let record = inputs.record(request, batch)?;
            assert_eq!(record.samples, samples);
            Ok::<_, CallError>(())
        })
        .is_some()
    });
}

/// A request with typed contents.
pub(crate) fn infer_request_of(samples: usize, text: bool) -> ModelInferRequest {
    let none = InferTensorContents::default;
    let tensor = |name: &str, datatype: &str, shape: Vec<usize>, contents| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.into_iter().map(|size| size as i64).collect(),
        parameters: HashMap::new(),
        contents: Some(contents),
    };
    let dense = (0..2 * samples).map(|n| n as f32).collect();
    let mut inputs = vec![tensor(
        "dense",
        "FP32",
        vec![samples, 2],
        InferTensorContents { fp32_contents: dense, ..none() },
    )];
    for FeatureColumn { name, lengths, ids, strings } in columns(samples, text) {
        let int64_contents: Vec<i64> = ids.iter().map(|id| *id as i64).collect();
        let count = int64_contents.len().max(strings.len());
        let shape = if lengths.is_empty() { vec![count, 1] } else { vec![count] };
        let datatype = if strings.is_empty() { "INT64" } else { "BYTES" };
        let contents = InferTensorContents { int64_contents, bytes_contents: strings, ..none() };
        inputs.push(tensor(&name, datatype, shape, contents));
        if !lengths.is_empty() {
            let int_contents = lengths.iter().map(|length| *length as i32).collect();
            let contents = InferTensorContents { int_contents, ..none() };
            inputs.push(tensor(&format!("{name}:lengths"), "INT32", vec![samples], contents));
        }
    }
    let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
    let timeout = ("timeout".to_owned(), parameter(ParameterChoice::Int64Param(1000)));
    let priority = ("priority".to_owned(), parameter(ParameterChoice::Uint64Param(1)));
    let output =
        |name: &str| InferRequestedOutputTensor { name: name.to_owned(), parameters: HashMap::new() };
    ModelInferRequest {
        model_name: "ads".to_owned(),
        model_version: "7".to_owned(),
        id: "x".to_owned(),
        parameters: [timeout, priority].into(),
        inputs,
        outputs: vec![output("score"), output("logit")],
        raw_input_contents: Vec::new(),
    }
}

/// The same request with raw contents.
fn raw(mut request: ModelInferRequest) -> ModelInferRequest {
    let raw = |input: &mut InferInputTensor| -> Bytes {
        let contents = input.contents.take().unwrap_or_default();
        let ints = contents.int_contents.iter().flat_map(|value| value.to_le_bytes());
        let longs = contents.int64_contents.iter().flat_map(|value| value.to_le_bytes());
        let floats = contents.fp32_contents.iter().flat_map(|value| value.to_le_bytes());
        let string = |value: &Bytes| [&(value.len() as u32).to_le_bytes()[..], value].concat();
        let strings = contents.bytes_contents.iter().flat_map(string);
        ints.chain(longs).chain(floats).chain(strings).collect()
    };
    request.raw_input_contents = request.inputs.iter_mut().map(raw).collect();
    request
}

/// A vector has room for four entries when it gets its first one.
#[test]
fn a_request_with_one_entry_of_a_kind_costs_what_it_takes() {
    let costs = |request: &ModelInferRequest| {
        let message = request.encode_to_vec();
        assert!(received::<InferRequest, ModelInferRequest>(&KSERVE, &message).is_some());
    };
    let none = ModelInferRequest::default;
    let contents = |contents| InferInputTensor { contents: Some(contents), ..Default::default() };
    let bytes = || vec![Bytes::from_static(b"x")];
    let strings = InferTensorContents { bytes_contents: bytes(), ..Default::default() };
    let outputs = vec![InferRequestedOutputTensor { name: "logit".to_owned(), ..Default::default() }];
    costs(&ModelInferRequest { inputs: vec![InferInputTensor::default()], ..none() });
    costs(&ModelInferRequest { inputs: vec![contents(strings.clone())], ..none() });
    costs(&ModelInferRequest { outputs: outputs.clone(), ..none() });
    costs(&ModelInferRequest { raw_input_contents: bytes(), ..none() });
    let inputs = vec![contents(strings)];
    costs(&ModelInferRequest { inputs, outputs, raw_input_contents: bytes(), ..none() });
    let request = PredictRequest { dense: vec![1.0], model: "m".to_owned(), ..Default::default() };
    assert!(received::<PredictMessage, PredictRequest>(&CTR, &request.encode_to_vec()).is_some());
    let request = LearnRequest { labels: vec![1.0], ..Default::default() };
    assert!(received::<LearnMessage, LearnRequest>(&CTR, &request.encode_to_vec()).is_some());
}

#[test]
fn model_infer() {
    let known = inputs();
    let typed = [infer_request_of(1, false), infer_request_of(3, true), infer_request_of(40, false)];
    let mut seeds = encoded(&typed);
    seeds.extend(encoded(&typed.map(raw)));
    run(wire::mutated(seeds, KSERVE_NESTED, WORDS), |Input(message)| {
        tensors_are_same(&message);
        let received = received::<InferRequest, ModelInferRequest>(&KSERVE, &message);
        let Some((request, cost)) = received else { return false };
        let (_, memory) = measured(|| (request.timeout(), request.priority().map_err(Status::from).is_ok()));
        assert!(memory <= 1 << 14, "{memory} for the parameters");
        let _ = answers::outputs(&request.head.outputs).map_err(|error| Status::from(CallError::from(error)));
        let raw_given = EncodedInputs::find(&request.message).is_ok_and(|parts| parts.are_raw());
        let encode = |request: &InferRequest, batch: &mut Batch| {
            EncodedInputs::find(&request.message)?.encode(&known, batch)
        };
        let of_request = (message.len(), cost);
        let batch = converted(of_request, |batch| encode(&request, batch));
        if let Some(batch) = &batch
            && let Ok(generated) = ModelInferRequest::decode(&message[..])
            && !raw_given
        {
            let of_raw = InferRequest::receive(raw(generated).encode_to_vec().into()).unwrap();
            let of_raw = converted(of_request, |batch| encode(&of_raw, batch));
            assert_eq!(of_raw.as_ref(), Some(batch), "typed and raw contents");
        }
        batch.is_some()
    });
}

#[test]
fn small_requests() {
    let model = || "ads".to_owned();
    let parameter = ModelRepositoryParameter { parameter_choice: None };
    let load = RepositoryModelLoadRequest {
        repository_name: String::new(),
        model_name: model(),
        parameters: [("unload_dependents".to_owned(), parameter)].into(),
    };
    let seeds = [
        GetModelRequest { model: model() }.encode_to_vec(),
        ModelMetadataRequest { name: model(), version: "7".to_owned() }.encode_to_vec(),
        RepositoryIndexRequest { repository_name: model(), ready: true }.encode_to_vec(),
        load.encode_to_vec(),
        SetLabelRequest { model: model(), label: "stable".to_owned(), version: 7, remove: true }
            .encode_to_vec(),
    ];
    run(wire::mutated(seeds.into(), &[&[3], &[3, 2]], WORDS), |Input(message)| {
        // All requests of a service are measured alike, so unknown fields may be refused too.
        fn valid<M: Receive>(layout: &'static Layout, message: &[u8]) -> bool {
            matches!(both::<M>(layout, message), (Some(_), Ok(_)))
        }
        let all = [
            valid::<GetModelRequest>(&CTR, &message),
            valid::<SetLabelRequest>(&CTR, &message),
            valid::<ModelMetadataRequest>(&KSERVE, &message),
            valid::<ModelStatisticsRequest>(&KSERVE, &message),
            valid::<RepositoryIndexRequest>(&KSERVE, &message),
            valid::<RepositoryModelLoadRequest>(&KSERVE, &message),
            valid::<RepositoryModelUnloadRequest>(&KSERVE, &message),
        ];
        all.contains(&true)
    });
}

#[test]
fn frames_of_a_stream() {
    let frames =
        |messages: Vec<Vec<u8>>| messages.iter().flat_map(|message| framed(message)).collect::<Vec<u8>>();
    let native = frames(encoded(&predict_requests()[..3]));
    let kserve = frames(encoded(&[infer_request_of(2, false), raw(infer_request_of(3, true))]));
    let metered = |layout, body: &[u8], piece: usize| {
        let (mut meter, mut ended) = (Meter::new(layout, MAX_BYTES), Vec::new());
        let pieces = body.chunks(piece).map(|piece| meter.feed(piece, |message| ended.push(message)));
        let cost: Result<usize, Fault> = pieces.sum();
        (cost, ended)
    };
    run(bytes::mutated([native, kserve], &[]), |Input(body)| {
        let mut valid = false;
        for layout in [&CTR, &KSERVE] {
            let (cost, ended) = metered(layout, &body, usize::MAX);
            assert_eq!(metered(layout, &body, 1 + body.len() % 60), (cost, ended.clone()));
            let known: usize = ended.iter().map(|message| message.cost).sum();
            valid |= cost.is_ok_and(|cost: usize| {
                assert!(known <= cost && cost >= body.len(), "{known} of {cost} for {} bytes", body.len());
                ended.len() > 1
            });
        }
        valid
    });
}
