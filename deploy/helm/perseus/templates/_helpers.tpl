{{- define "perseus.name" -}}
{{- ternary .Release.Name (printf "%s-perseus" .Release.Name) (contains "perseus" .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "perseus.labels" -}}
app.kubernetes.io/name: perseus
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Of a part: (dict "root" $ "part" "agent"). */ -}}
{{- define "perseus.selector" -}}
app.kubernetes.io/name: perseus
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "perseus.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}

{{- define "perseus.coordinatorSettings" -}}
{{- $c := .Values.coordinator -}}
{{- $own := dict
  "listen" "0.0.0.0:50051"
  "http" "0.0.0.0:8080"
  "tls_certificate" "/etc/perseus/tls/tls.crt"
  "tls_key" "/etc/perseus/tls/tls.key"
  "operator_token_file" "/var/lib/perseus/operator.token"
-}}
{{- if not $c.databaseSecret }}{{ $_ := set $own "database" "/var/lib/perseus/jobs.db" }}{{ end -}}
{{- if $c.tls.mutual }}{{ $_ := set $own "tls_client_ca" "/etc/perseus/tls/ca.crt" }}{{ end -}}
{{- toToml (merge (deepCopy $c.settings) $own) -}}
{{- end -}}

{{- define "perseus.agentSettings" -}}
{{- $a := .Values.agent -}}
{{- $name := printf "%s-coordinator" (include "perseus.name" .) -}}
{{- $service := printf "%s.%s.svc:50051" $name .Release.Namespace -}}
{{- if gt (int .Values.coordinator.replicas) 1 -}}
{{- $all := list -}}
{{- range $number := until (int .Values.coordinator.replicas) -}}
{{- $all = append $all (printf "%s-%d.%s.svc:50051" $name $number $.Release.Namespace) -}}
{{- end -}}
{{- $service = join "," $all -}}
{{- end -}}
{{- $own := dict
  "coordinator" ($a.coordinator | default $service)
  "tls_ca" "/etc/perseus/tls/ca.crt"
  "token_file" "/etc/perseus/token/token"
  "socket" "/run/perseus/agent.sock"
  "socket_mode" $a.socketMode
  "restore_folder" "/var/lib/perseus/restore"
-}}
{{- if $a.tls.mutual }}
{{- $_ := set $own "tls_certificate" "/etc/perseus/tls/tls.crt" }}
{{- $_ := set $own "tls_key" "/etc/perseus/tls/tls.key" }}
{{- end -}}
{{- toToml (merge (deepCopy $a.settings) $own) -}}
{{- end -}}
