{{- define "megatronapp.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* With the longest suffix, -gateway-metrics, it must fit the 63 characters of a Service's name. */}}
{{- define "megatronapp.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* Name of an object of the whole cluster: two installs in one cluster do not meet. */}}
{{- define "megatronapp.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "megatronapp.fullname" .) -}}
{{- end -}}

{{/* Labels by which Services and policies select pods of a component: (dict "root" $ "component" "gateway"). */}}
{{- define "megatronapp.selectorLabels" -}}
app.kubernetes.io/name: {{ include "megatronapp.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "megatronapp.labels" -}}
{{ include "megatronapp.selectorLabels" . }}
app.kubernetes.io/part-of: megatronapp
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The same labels as a flag's value, k=v,... */}}
{{- define "megatronapp.selectorFlag" -}}
{{- include "megatronapp.selectorLabels" . | replace ": " "=" | replace "\n" "," -}}
{{- end -}}

{{- define "megatronapp.mapFlag" -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- define "megatronapp.operatorAccount" -}}
{{- $own := printf "%s-operator" (include "megatronapp.fullname" .) -}}
{{- if .Values.operator.serviceAccount.create -}}
{{- default $own .Values.operator.serviceAccount.name -}}
{{- else -}}
{{- required "operator.serviceAccount.create is false: name the account in operator.serviceAccount.name" .Values.operator.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "megatronapp.leaseName" -}}
{{- default (printf "%s-operator" (include "megatronapp.fullname" .)) .Values.operator.leaseName -}}
{{- end -}}

{{- define "megatronapp.gatewayAccount" -}}
{{- $own := printf "%s-gateway" (include "megatronapp.fullname" .) -}}
{{- if .Values.gateway.serviceAccount.create -}}
{{- default $own .Values.gateway.serviceAccount.name -}}
{{- else -}}
{{- required "gateway.serviceAccount.create is false: name the account in gateway.serviceAccount.name" .Values.gateway.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* An image's reference: (dict "root" $ "image" .Values.images.trainer). */}}
{{- define "megatronapp.image" -}}
{{- $place := .image.repository -}}
{{- if .root.Values.images.registry -}}
{{- $place = printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) .image.repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $place .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $place (.image.tag | default .root.Values.images.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "megatronapp.keySecret" -}}
{{- default (printf "%s-key" (include "megatronapp.fullname" .)) .Values.key.existingSecret -}}
{{- end -}}

{{/* "true" where kinds of monitoring.coreos.com are to be made: (dict "root" $ "enabled" value). */}}
{{- define "megatronapp.monitors" -}}
{{- if kindIs "bool" .enabled -}}
{{- if .enabled -}}true{{- end -}}
{{- else if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
true
{{- end -}}
{{- end -}}

{{/* "true" where the gateway may ask the API server who somebody is and what he may do. */}}
{{- define "megatronapp.reviews" -}}
{{- if and .Values.gateway.enabled .Values.gateway.reviews (not .Values.watchNamespaces) -}}true{{- end -}}
{{- end -}}

{{/* "true" of a switch that is on by default and that `helm upgrade --reuse-values` from an older chart leaves out. */}}
{{- define "megatronapp.onUnlessFalse" -}}
{{- if ne (toString .) "false" -}}true{{- end -}}
{{- end -}}

{{/* Five minutes to start, on a node that is short of processor time. */}}
{{- define "megatronapp.startup" -}}
httpGet: {path: /healthz, port: metrics}
periodSeconds: 2
timeoutSeconds: 5
failureThreshold: 150
{{- end -}}

{{/* Where a pod of operator or gateway runs: (dict "root" $ "part" .Values.gateway "labels" $labels). Several replicas prefer
nodes of their own. They do not demand them: an update needs room for one more than there are nodes. */}}
{{- define "megatronapp.placement" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $apart := .part.antiAffinity | default "preferred" -}}
{{- if .part.affinity }}
affinity:
  {{- toYaml .part.affinity | nindent 2 }}
{{- else if and .labels (eq $apart "required") (gt (int .part.replicaCount) 1) }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "megatronapp.selectorLabels" .labels | nindent 12 }}
{{- else if and .labels (eq $apart "preferred") (gt (int .part.replicaCount) 1) (not .part.topologySpreadConstraints) }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "megatronapp.selectorLabels" .labels | nindent 14 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName | default (include "megatronapp.priorityClass" .root) }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Of a Deployment whose pods demand nodes of their own: one goes before the next comes. */}}
{{- define "megatronapp.strategy" -}}
{{- if and (eq (.antiAffinity | default "preferred") "required") (gt (int .replicaCount) 1) (not .affinity) }}
strategy:
  type: RollingUpdate
  rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
{{- end }}
{{- end -}}

{{/* Name of the PriorityClass that the chart creates; empty: none. */}}
{{- define "megatronapp.priorityClass" -}}
{{- with .Values.priorityClass }}
{{- if .create }}
{{- default (include "megatronapp.clusterName" $) .name }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Secret with the certificate of the gateway; empty: it serves no TLS. */}}
{{- define "megatronapp.tlsSecret" -}}
{{- $tls := .Values.gateway.tls | default dict -}}
{{- $made := ternary (printf "%s-gateway-tls" (include "megatronapp.fullname" .)) "" (dig "certManager" "enabled" false $tls) -}}
{{- $tls.secretName | default $made -}}
{{- end -}}

{{/* Names by which the gateway is reached. */}}
{{- define "megatronapp.dnsNames" -}}
{{- $service := include "megatronapp.fullname" . -}}
{{- $names := list -}}
{{- with .Values.gateway.ingress }}{{ if .enabled }}{{ $names = append $names .host }}{{ end }}{{ end -}}
{{- with .Values.gateway.httpRoute }}{{ if .enabled }}{{ $names = concat $names (.hostnames | default list) }}{{ end }}{{ end -}}
{{- $names = concat $names (list (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s.svc.%s" $service .Release.Namespace .Values.clusterDomain)) -}}
{{- .Values.gateway.tls.certManager.dnsNames | default ($names | uniq) | toJson -}}
{{- end -}}

{{/* Volumes of operator and gateway. */}}
{{- define "megatronapp.volumes" -}}
- name: key
  secret:
    secretName: {{ include "megatronapp.keySecret" . }}
    defaultMode: 0440
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- end -}}

{{- define "megatronapp.mounts" -}}
- {name: key, mountPath: /run/megatronapp/key, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}
