{{- define "flechette.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "flechette.selector" -}}
app.kubernetes.io/name: flechette
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "flechette.labels" -}}
{{ include "flechette.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What every container may do: nothing. */}}
{{- define "flechette.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A TOML value. Helm reads whole numbers of values as floats. */}}
{{- define "flechette.toml" -}}
{{- if kindIs "string" . }}{{ . | toJson }}
{{- else if kindIs "float64" . }}{{ if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . | toJson }}{{ end }}
{{- end -}}
