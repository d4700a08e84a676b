//! KServe's responses: scores, descriptions of the server and of models, statistics.

use std::collections::HashMap;

use prost::bytes::Bytes;
use tonic::Status;

use super::tensors::{LENGTHS, dense_name};
use crate::metrics::{RunningTotal, Total};
use crate::predict::Description;
use crate::schema::{Arity, Schema};
use crate::server::convert::{self, architecture, clip};
use crate::server::inference::infer_parameter::ParameterChoice;
use crate::server::inference::model_infer_request::InferRequestedOutputTensor;
use crate::server::inference::model_infer_response::InferOutputTensor;
use crate::server::inference::model_metadata_response::TensorMetadata;
use crate::server::inference::{
    InferParameter, InferStatistics, InferTensorContents, ModelInferResponse, ModelMetadataResponse,
    ModelStatistics, ModelStreamInferResponse, ServerMetadataResponse, StatisticDuration,
};
use crate::server::model::Model;
use crate::server::serving_engine::ServingEngine;
use crate::server::status::CallError;
use crate::types::Scores;

/// The names of the outputs.
const SCORE: &str = "score";
const LOGIT: &str = "logit";

/// Begins the names of the response's parameters that count absent ids.
const ABSENT: &str = "absent_ids:";

/// Why the requested outputs cannot be computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutputError {
    #[error("output {name:?}: the outputs are \"score\" and \"logit\"")]
    Unknown { name: String },
    #[error("output {name:?}: parameter {parameter:?} is not supported")]
    Parameter { name: String, parameter: &'static str },
}

/// The outputs of a response.
#[derive(Clone, Copy)]
pub(crate) struct Outputs {
    pub score: bool,
    pub logit: bool,
}

/// The outputs that a request asks for: the score if it names none.
///
/// # Errors
/// When there is no such output, or it should be returned in another way.
pub(crate) fn outputs(named: &[InferRequestedOutputTensor]) -> Result<Outputs, OutputError> {
    let mut outputs = Outputs { score: named.is_empty(), logit: false };
    for output in named {
        let name = || clip(output.name.clone());
        match output.name.as_str() {
            SCORE => outputs.score = true,
            LOGIT => outputs.logit = true,
            _ => return Err(OutputError::Unknown { name: name() }),
        }
        for parameter in ["classification", "shared_memory_region"] {
            if output.parameters.contains_key(parameter) {
                return Err(OutputError::Parameter { name: name(), parameter });
            }
        }
    }
    Ok(outputs)
}

/// What the response to a request takes from it.
pub(crate) struct Form {
    pub model: String,
    pub id: String,
    /// Whether the contents of the request were raw. Then those of the response are.
    pub raw: bool,
    pub outputs: Outputs,
}

impl Form {
    /// The response with these scores.
    pub(crate) fn response(self, scores: Scores, schema: &Schema) -> ModelInferResponse {
        let Self { model, id, raw, outputs: asked } = self;
        let native = convert::response(scores, schema);
        let (mut outputs, mut raw_output_contents) = (Vec::new(), Vec::new());
        let named = [(SCORE, asked.score, native.scores), (LOGIT, asked.logit, native.logits)];
        for (name, _, values) in named.into_iter().filter(|(_, asked, _)| *asked) {
            let shape = vec![values.len() as i64, 1];
            let contents = if raw {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                raw_output_contents.push(Bytes::from(bytes));
                None
            } else {
                Some(InferTensorContents { fp32_contents: values, ..InferTensorContents::default() })
            };
            let (name, datatype) = (name.to_owned(), "FP32".to_owned());
            outputs.push(InferOutputTensor { name, datatype, shape, parameters: HashMap::new(), contents });
        }
        let absent = native.absent.into_iter().map(|absent| {
            let count = ParameterChoice::Int64Param(absent.count as i64);
            (format!("{ABSENT}{}", absent.feature), InferParameter { parameter_choice: Some(count) })
        });
        ModelInferResponse {
            model_name: model,
            model_version: native.version.to_string(),
            id,
            parameters: absent.collect(),
            outputs,
            raw_output_contents,
        }
    }
}

/// The answer to a request in a stream.
pub(crate) fn of_stream(
    answered: Result<ModelInferResponse, CallError>,
    id: String,
) -> ModelStreamInferResponse {
    let (error_message, mut response) = match answered {
        Ok(response) => (String::new(), response),
        Err(error) => {
            let failed = ModelInferResponse { id, ..ModelInferResponse::default() };
            (Status::from(error).message().to_owned(), failed)
        }
    };
    // Clients of streams may ask which answer to a request is the last one. There is only one.
    let last = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    response.parameters.insert("triton_final_response".to_owned(), last);
    ModelStreamInferResponse { error_message, infer_response: Some(response) }
}

/// Describes the server.
pub(crate) fn server_metadata() -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: "flechette".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: ["model_repository", "statistics"].map(str::to_owned).to_vec(),
    }
}

/// Describes the tensors of a model, and lists its loaded versions.
pub(crate) fn model_metadata(model: &Model) -> ModelMetadataResponse {
    let Description { model: name, schema, .. } = model.stable().predict.describe();
    let schema = &schema;
    let tensor = |name: &str, datatype: &str, shape: &[i64]| TensorMetadata {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
    };
    let mut inputs = Vec::new();
    if schema.dense_width() > 0 {
        inputs.push(tensor(dense_name(schema), "FP32", &[-1, schema.dense_width() as i64]));
    }
    for feature in &schema.features {
        // A feature with a hash takes ids too.
        let datatype = if feature.hash.is_some() { "BYTES" } else { "INT64" };
        if feature.arity == Arity::OneHot {
            inputs.push(tensor(&feature.name, datatype, &[-1, 1]));
        } else {
            inputs.push(tensor(&feature.name, datatype, &[-1]));
            inputs.push(tensor(&format!("{}{LENGTHS}", feature.name), "INT32", &[-1]));
        }
    }
    ModelMetadataResponse {
        platform: format!("flechette_{}", architecture(schema)),
        versions: model.versions().iter().map(|loaded| loaded.version.to_string()).collect(),
        inputs,
        outputs: [SCORE, LOGIT].map(|name| tensor(name, "FP32", &[-1, 1])).to_vec(),
        name,
    }
}

/// Statistics of an engine: since its version was loaded, or, for the main engine, since the model was
/// loaded.
pub(crate) fn statistics(engine: &ServingEngine) -> ModelStatistics {
    let Description { model, version, .. } = engine.predict.describe();
    let statistics = &engine.metrics.statistics;
    let duration = |total: &RunningTotal| {
        let Total { count, nanos: ns } = total.get();
        Some(StatisticDuration { count, ns })
    };
    ModelStatistics {
        name: model,
        version: version.to_string(),
        last_inference: statistics.last_unix_ms(),
        inference_count: statistics.samples(),
        execution_count: statistics.batches(),
        inference_stats: Some(InferStatistics {
            success: duration(&statistics.success),
            fail: duration(&statistics.fail),
            queue: duration(&statistics.queue),
            compute_input: duration(&statistics.input),
            compute_infer: duration(&statistics.compute),
        }),
    }
}
