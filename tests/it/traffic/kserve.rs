//! Several versions by the KServe protocol: lists, statistics, and requests for a version or a label.

use flechette::server::inference::infer_parameter::ParameterChoice;
use flechette::server::inference::{
    InferParameter, ModelInferRequest, ModelMetadataRequest, ModelReadyRequest, ModelStatistics,
    ModelStatisticsRequest, RepositoryIndexRequest,
};
use tonic::{Code, Status};

use super::world::{MODEL, World};
use crate::kserve::messages::typed;

#[test]
fn kserve_lists_all_loaded_versions() {
    let world = World::new(3);
    let mut client = world.serve("versions = \"latest 2\"", "");
    client.scored_by(&world, |request| request.version = 2).unwrap();
    let (runtime, kserve) = (&client.runtime, &mut client.kserve);
    let request = ModelMetadataRequest { name: MODEL.to_owned(), version: "2".to_owned() };
    let metadata = runtime.block_on(kserve.model_metadata(request)).unwrap().into_inner();
    assert_eq!(metadata.versions, ["2", "3"]);
    let request = ModelMetadataRequest { name: MODEL.to_owned(), version: "1".to_owned() };
    assert_eq!(runtime.block_on(kserve.model_metadata(request)).unwrap_err().code(), Code::NotFound);
    let index = runtime.block_on(kserve.repository_index(RepositoryIndexRequest::default()));
    let index = index.unwrap().into_inner().models;
    let rows: Vec<_> = index.iter().map(|row| (row.version.as_str(), row.state.as_str())).collect();
    assert_eq!(rows, [("2", "READY"), ("3", "READY")]);
    let request = ModelStatisticsRequest { name: MODEL.to_owned(), version: String::new() };
    let statistics = runtime.block_on(kserve.model_statistics(request)).unwrap().into_inner().model_stats;
    let rows: Vec<_> = statistics.iter().map(|row| (row.version.as_str(), row.inference_count)).collect();
    assert_eq!(rows, [("2", 16), ("3", 0)]);
    let mut ready = |version: &str| {
        let request = ModelReadyRequest { name: MODEL.to_owned(), version: version.to_owned() };
        runtime.block_on(kserve.model_ready(request)).unwrap().into_inner().ready
    };
    assert!(ready("2") && ready("3") && ready("") && !ready("1"));
    client.ends_well();
}

#[test]
fn statistics_count_a_wrong_request_for_the_version_that_it_is_for() {
    let world = World::new(2);
    let mut client = world.serve("versions = \"latest 2\"\nlabels = { old = 1 }", "");
    for (version, label) in [(1, ""), (0, "old"), (2, ""), (1, "")] {
        let mut request = world.requests[0].clone();
        (request.version, request.label) = (version, label.to_owned());
        request.dense.pop();
        assert_eq!(client.predict(request).unwrap_err().code(), Code::InvalidArgument);
    }
    let request = ModelStatisticsRequest { name: MODEL.to_owned(), version: String::new() };
    let statistics = client.runtime.block_on(client.kserve.model_statistics(request)).unwrap().into_inner();
    let failed = |row: &ModelStatistics| row.inference_stats.and_then(|stats| stats.fail).unwrap().count;
    let rows: Vec<_> = statistics.model_stats.iter().map(|row| (row.version.as_str(), failed(row))).collect();
    assert_eq!(rows, [("1", 3), ("2", 1)]);
    client.ends_well();
}

#[test]
fn a_kserve_request_names_a_version_or_a_label_and_its_id_is_the_key() {
    let world = World::new(2);
    let client = world.serve("labels = { stable = 1, canary = 2 }\ncanary_share = 0.3", "");
    let infer = |change: &dyn Fn(&mut ModelInferRequest)| {
        let mut request = typed(&world.requests[0]);
        change(&mut request);
        let mut kserve = client.kserve.clone();
        let answer = client.runtime.block_on(kserve.model_infer(request))?.into_inner();
        let scores = &answer.outputs[0].contents.as_ref().unwrap().fp32_contents;
        let version: u64 = answer.model_version.parse().unwrap();
        assert_eq!(world.version_of(0, scores), version);
        Ok::<u64, Status>(version)
    };
    let label = |choice: ParameterChoice| {
        let label = InferParameter { parameter_choice: Some(choice) };
        infer(&|request| drop(request.parameters.insert("label".to_owned(), label.clone())))
    };
    for (version, name) in [(1, "stable"), (2, "canary")] {
        assert_eq!(infer(&|request| request.model_version = version.to_string()).unwrap(), version);
        assert_eq!(label(ParameterChoice::StringParam(name.to_owned())).unwrap(), version);
    }
    let wrong = label(ParameterChoice::Int64Param(2)).unwrap_err();
    assert_eq!(
        (wrong.code(), wrong.message()),
        (Code::InvalidArgument, "parameters: label: expected a string")
    );
    for user in 0..40 {
        let by_kserve = infer(&|request| request.id = format!("user-{user}")).unwrap();
        let native = client.scored_by(&world, |request| request.request_id = format!("user-{user}")).unwrap();
        assert_eq!(by_kserve, native, "both protocols have one hash");
    }
    client.ends_well();
}
