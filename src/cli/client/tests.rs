use super::*;
use crate::schema::preset::{self, ArchKind};

#[test]
fn columns_are_sent_without_hashing() {
    let text = RawFeature {
        offsets: vec![0, 1, 2],
        values: RawValues::Text { bytes: b"abc".to_vec(), ends: vec![0, 3] },
    };
    let column = feature_column("C1", &text);
    assert_eq!(column.strings, [&b""[..], b"abc"]);
    assert!(column.lengths.is_empty() && column.ids.is_empty(), "one value per sample needs no lengths");
    let bags = RawFeature { offsets: vec![0, 0, 2], values: RawValues::Ids(vec![7, 9]) };
    let column = feature_column("tags", &bags);
    assert_eq!((column.lengths, column.ids), (vec![0, 2], vec![7, 9]));
}

#[tokio::test]
async fn a_call_without_an_answer_in_time_is_late_and_not_cancelled() {
    let limit = Duration::from_secs(30);
    let late = async { Err::<(), _>(Status::from_error(Box::new(tonic::TimeoutExpired(())))) };
    let status = whole(limit, late).await.unwrap_err();
    assert_eq!(status_text(&status), "DEADLINE_EXCEEDED: no answer within 30 s");
}

#[test]
fn a_request_has_the_features_in_the_order_of_the_schema() {
    let schema = preset::criteo(ArchKind::Dlrm, 4, 10);
    let column = RawFeature { offsets: vec![0, 1], values: RawValues::Ids(vec![3]) };
    let raw = RawBatch { samples: 1, dense: vec![0.5; 13], features: vec![column; 26], labels: None };
    let request = request("ads", &schema, &raw);
    assert_eq!((request.samples, request.dense.len()), (1, 13));
    let names = schema.features.iter().map(|feature| &feature.name);
    assert!(request.features.iter().map(|column| &column.name).eq(names));
}
