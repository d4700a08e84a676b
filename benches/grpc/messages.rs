//! The same samples as a native message, as a KServe message, as Triton's, and as a batch.

use flechette::schema::Schema;
use flechette::server::inference::model_infer_request::InferInputTensor;
use flechette::server::inference::{ModelInferRequest, ModelInferResponse};
use flechette::server::proto::{FeatureColumn, PredictRequest};
use flechette::types::{Batch, Jagged};
use prost::Message;

use super::harness::Draw;

/// The messages of a setting.
pub struct Messages {
    pub native: PredictRequest,
    pub kserve: ModelInferRequest,
    pub triton: ModelInferRequest,
}

/// The samples: dense values of each sample, and ids by feature.
fn samples(schema: &Schema, samples: usize) -> (Vec<f32>, Vec<Vec<u64>>) {
    let mut draw = Draw::new(samples as u64);
    let dense = (0..samples * schema.dense_width()).map(|_| draw.below(1000) as f32 / 500.0).collect();
    let ids = schema.tables.iter().map(|table| (0..samples).map(|_| draw.below(table.rows)).collect());
    (dense, ids.collect())
}

/// A batch of the same samples, for the forward pass.
pub fn batch(schema: &Schema, count: usize) -> Batch {
    let (dense, ids) = samples(schema, count);
    let column = |ids: Vec<u64>| Jagged { offsets: (0..=count as u32).collect(), ids };
    Batch { samples: count, dense, features: ids.into_iter().map(column).collect(), ..Batch::default() }
}

impl Messages {
    pub fn new(model: &str, schema: &Schema, count: usize) -> Self {
        let (dense, ids) = samples(schema, count);
        let column = |(i, ids): (usize, &Vec<u64>)| FeatureColumn {
            name: schema.features[i].name.clone(),
            ids: ids.clone(),
            ..FeatureColumn::default()
        };
        let native = PredictRequest {
            model: model.to_owned(),
            samples: count as u32,
            dense: dense.clone(),
            features: ids.iter().enumerate().map(column).collect(),
            ..PredictRequest::default()
        };
        let dense: Vec<u8> = dense.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = |ids: &mut dyn Iterator<Item = u64>| ids.flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        let mut kserve = request(model);
        kserve.inputs.push(tensor("dense", "FP32", [count, schema.dense_width()]));
        kserve.raw_input_contents.push(dense.clone().into());
        for (i, ids) in ids.iter().enumerate() {
            kserve.inputs.push(tensor(&schema.features[i].name, "INT64", [count, 1]));
            kserve.raw_input_contents.push(bytes(&mut ids.iter().copied()).into());
        }
        let mut triton = request(model);
        triton.inputs.push(tensor("dense", "FP32", [count, schema.dense_width()]));
        triton.inputs.push(tensor("ids", "INT64", [count, ids.len()]));
        let rows = (0..count).flat_map(|sample| ids.iter().map(move |column| column[sample]));
        triton.raw_input_contents = vec![dense.into(), bytes(&mut rows.into_iter()).into()];
        Self { native, kserve, triton }
    }
}

fn request(model: &str) -> ModelInferRequest {
    ModelInferRequest { model_name: model.to_owned(), ..ModelInferRequest::default() }
}

fn tensor(name: &str, datatype: &str, shape: [usize; 2]) -> InferInputTensor {
    InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.map(|size| size as i64).to_vec(),
        ..InferInputTensor::default()
    }
}

/// The scores of a response with raw contents.
pub fn scores(response: &ModelInferResponse) -> Vec<f32> {
    let raw = response.raw_output_contents.first().map(|raw| &raw[..]).unwrap_or_default();
    raw.chunks_exact(4).filter_map(|bytes| Some(f32::from_le_bytes(bytes.try_into().ok()?))).collect()
}

/// A message as it is sent: a byte for no compression, its length, its bytes.
pub fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0], &(bytes.len() as u32).to_be_bytes()[..], &bytes].concat()
}
