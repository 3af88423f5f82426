"""The HTTP API: application, middleware, authorisation, request and response models, OpenAPI description. Imports every
package of the controller except `app`; the routes are in `api.routes`.
"""
