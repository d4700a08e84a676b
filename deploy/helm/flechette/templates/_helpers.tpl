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

{{/* A TOML value: a map is an inline table. JSON writes numbers, strings and booleans as TOML does. */}}
{{- define "flechette.toml" -}}
{{- $parts := list -}}
{{- if kindIs "map" . -}}
{{- range $key, $value := . -}}
{{- $parts = append $parts (printf "%s = %s" (include "flechette.key" $key) (include "flechette.toml" $value)) -}}
{{- end -}}
{{- printf "{%s}" (join ", " $parts) -}}
{{- else if kindIs "slice" . -}}
{{- range . }}{{ $parts = append $parts (include "flechette.toml" .) }}{{ end -}}
{{- printf "[%s]" (join ", " $parts) -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* A TOML key. One with other characters than these needs quotes. */}}
{{- define "flechette.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* How the HTTP port is called: http or https. */}}
{{- define "flechette.scheme" -}}
{{- ternary "https" "http" (eq (dig "tls" "http" "off" .Values.settings) "on") -}}
{{- end -}}

{{/* The port of an address. */}}
{{- define "flechette.port" -}}
{{- regexFind "[0-9]+$" . -}}
{{- end -}}
