use super::*;

#[test]
fn every_preset_is_valid_and_reads_back_equal() {
    for kind in ArchKind::ALL {
        let shape = SyntheticShape { tables: 4, rows: 1000, dense: 2, multi_hot: Some(5) };
        for schema in [criteo(kind, 16, 1000), avazu(kind, 16, 1000), synthetic(kind, 8, shape)] {
            assert_eq!(Schema::parse(&schema.to_toml()), Ok(schema));
        }
    }
}

#[test]
fn a_wide_architecture_has_a_first_order_weight_for_each_feature() {
    let schema = criteo(ArchKind::Deepfm, 16, 1000);
    assert_eq!(schema.tables.len(), 52);
    assert_eq!(schema.features[3].wide_table.as_deref(), Some("C4_wide"));
    assert_eq!(schema.input_width(), 13 + 26 * 16 + 26);
    assert_eq!(criteo(ArchKind::Dlrm, 16, 1000).tables.len(), 26);
}

#[test]
fn an_element_type_applies_where_it_makes_rows_shorter() {
    for element in Element::ALL {
        let schema = criteo(ArchKind::Deepfm, 16, 1000).stored_as(element);
        assert!(schema.tables[..26].iter().all(|t| t.element == element));
        assert!(schema.tables[26..].iter().all(|t| t.element == Element::F32), "first-order weights");
        assert!(schema.lookups()[..26].iter().all(|l| l.element == element));
        assert_eq!(Schema::parse(&schema.to_toml()), Ok(schema));
    }
    assert_eq!(criteo(ArchKind::Dcn, 16, 10).stored_as(Element::F16).tables[0].row_bytes(), 32);
    assert_eq!(criteo(ArchKind::Dcn, 16, 10).stored_as(Element::Int8).tables[0].row_bytes(), 24);
    assert_eq!(criteo(ArchKind::Dcn, 3, 10).stored_as(Element::Int8).tables[0].row_bytes(), 12);
}

#[test]
fn architectures_are_named_as_in_the_schema() {
    for kind in ArchKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
        assert!(avazu(kind, 4, 10).to_toml().contains(&format!("kind = \"{kind}\"")));
    }
    assert!("DLRM".parse::<ArchKind>().is_err());
}
